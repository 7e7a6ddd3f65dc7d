"""The only file that may touch JAX internals: what is used, why, and what replaces it where it is gone."""

from typing import Any

import jax
from jax._src import core, xla_bridge

# Where the pure functions that JAX offers say they are defined: some under their public module, some under their own.
MODULES_OF_FUNCTIONS = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy", "jax._src.numpy", "jax._src.nn", "jax._src.lax")


def backends_are_initialized() -> bool:
    """Whether JAX has opened its devices. JAX has no public question for it, and asking for devices opens them."""
    return bool(xla_bridge.backends_are_initialized())


def trace_state_clean() -> bool:
    """Whether no transformation is under way. ``jax.core`` had it; its documented remains say no more than "jit"."""
    return bool(core.trace_state_clean())


def shaped(shape: tuple[int, ...], dtype: Any, *, weak: bool = False) -> Any:
    """An abstract array."""
    canonical = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.core.ShapedArray(shape, canonical, weak_type=weak)


def weakly_typed(array: Any) -> Any:
    """An array whose type gives way to others, as a Python number's does. JAX makes such arrays of numbers only."""
    if getattr(array, "weak_type", False):
        return array
    array = jax.numpy.asarray(array)
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def configured(option: str) -> Any:
    """What a JAX option is set to, as ``jax.config.update`` takes it. Not every option can be read as an attribute."""
    return jax.config.values[option]


def abstract_token() -> Any:
    """The type of the tokens that order effects. ``jax.ffi`` offers it from JAX 0.11 on."""
    return getattr(jax.ffi, "abstract_token", None) or core.abstract_token
