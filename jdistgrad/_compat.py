"""The only module that may use JAX internals: each use with its reason, and its replacement where JAX has one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import ad_checkpoint, ad_util, array, config, core, dispatch, util, xla_bridge
from jax._src.interpreters import batching, partial_eval
from jax._src.lax.control_flow import conditionals
from jax._src.lib import xla_client  # type: ignore[attr-defined]

# Prefixes of ``__module__`` of JAX's own pure functions: the public module for some, the defining module for others.
MODULES_OF_FUNCTIONS = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy", "jax._src.numpy", "jax._src.nn", "jax._src.lax")

# The type of arrays. ``isinstance(x, jax.Array)`` runs Python code of JAX, for each array of each call.
ARRAY = array.ArrayImpl


def array_of(memory: np.ndarray) -> jax.Array:
    """Return a JAX array of a NumPy array whose memory does not change any more; it may share the memory.

    ``jax.device_put`` runs Python code for 90 us, ``jax.numpy.asarray`` for 40, and this function for 8.
    """
    device = config.default_device.value
    if device is not None and not isinstance(device, jax.Device):  # the name of a platform
        return jax.device_put(memory)
    sharding, devices = _place_of(device)
    kind = _type_of(memory.shape, memory.dtype)
    made: jax.Array = xla_client.batched_device_put(kind, sharding, [memory], devices, committed=False)
    return made


_type_of = functools.lru_cache(maxsize=4096)(jax.core.ShapedArray)  # of a shape and a dtype


@functools.cache
def _place_of(device: jax.Device | None) -> tuple[Any, list[jax.Device]]:
    chosen = jax.local_devices()[0] if device is None else device
    return jax.sharding.SingleDeviceSharding(chosen), [chosen]


def backends_are_initialized() -> bool:
    """Return whether JAX has opened its devices. Its public API has no such test, and listing devices opens them."""
    return bool(xla_bridge.backends_are_initialized())


# Whether no transformation is under way. ``jax.core`` no longer offers this test; those that JAX still documents only
# detect jit.
trace_state_clean: Callable[[], bool] = core.trace_state_clean


def shaped(shape: tuple[int, ...], dtype: Any, *, weak: bool = False) -> Any:
    """Return an abstract array of this shape and dtype."""
    canonical = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return jax.core.ShapedArray(shape, canonical, weak_type=weak)


def varies_over(array_type: Any) -> frozenset[Any]:
    """Return the axes of ``jax.shard_map`` over which arrays of a type differ. The name of this has changed in JAX."""
    return frozenset(array_type.mat.varying if hasattr(array_type, "mat") else getattr(array_type, "vma", ()))


def varying_like(like: Any, array_type: Any) -> Any:
    """Return the type of arrays that differ over the axes over which those of another type do."""
    given = {name: getattr(array_type, name) for name in ("shape", "dtype", "weak_type")}
    spec = jax.sharding.PartitionSpec(*(None for _ in array_type.shape))
    return like.update(**given, sharding=jax.sharding.NamedSharding(like.sharding.mesh, spec))


def weakly_typed(array: Any) -> Any:
    """Return an array as weakly typed, like a Python number. JAX's public API makes such arrays from numbers only."""
    if getattr(array, "weak_type", False):
        return array
    array = jax.numpy.asarray(array)
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def forgotten_when_gone(kind: type) -> None:
    """Let JAX's cache of equations' shapes forget an equation when an object of this type in it is gone.

    Otherwise it keeps the objects of some 2000 equations, with all arrays in them. JAX offers this to jaxprs only, and
    no primitive without that cache.
    """
    known: set[type] = getattr(util, "weakref_cache_key_types", set())  # a JAX without this set only keeps more
    known.add(kind)


def configured(option: str) -> Any:
    """Return a JAX option's value, as ``jax.config.update`` takes it. Some options cannot be read as attributes."""
    return jax.config.values[option]


def settings_of_results() -> tuple[bool, Any, Any]:
    """Return x64, the precision of products and the default device in 0.3 us; ``jax.config.values`` takes 12."""
    return config.enable_x64.value, config.default_matmul_precision.value, config.default_device.value


def x64_elsewhere() -> bool | None:
    """Return the process's setting of x64 if a block of ``jax.enable_x64`` gives this thread another, else None."""
    everywhere: bool = config.enable_x64.get_global()
    return None if config.enable_x64.value == everywhere else everywhere


def static_arguments(function: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers and names of the static arguments of a jitted function, for which JAX has no public name."""
    found = getattr(function, "_jit_info", None)
    return (found.static_argnums, found.static_argnames) if found is not None else ((), ())


def trace_context() -> Any:
    """Return the options of JAX by which the caches of ``jax.jit`` distinguish traces. It has no public name."""
    return config.trace_context()


def abstract_token() -> Any:
    """Return the type of the tokens that order effects. ``jax.ffi`` offers it from JAX 0.11 on."""
    return getattr(jax.ffi, "abstract_token", None) or core.abstract_token


def forget_failed_effects() -> None:
    """Let this thread's next programs with ordered effects start over if an earlier one failed.

    JAX keeps the token of the last such program. If that program failed on one of XLA's threads, JAX raises its error
    in every later program of this thread, and offers no way to clear the error.
    """
    tokens = dispatch.runtime_tokens
    for token in tokens.current_tokens.values():
        buffer: Any = token._buf
        if buffer.is_ready():
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError:
                tokens.clear()
                return


def lowered(closed: Any, *, whole: bool = False) -> Any:
    """Return a closed jaxpr without types that are defined with ``jax.experimental.hijax``, which it may have.

    ``whole``: with all equations. ``lower_jaxpr2`` of JAX 0.12 drops those whose results are not used.
    """
    if not closed.jaxpr.is_high:
        return closed
    if not whole or not hasattr(partial_eval, "lower_jaxpr_reference"):
        return partial_eval.lower_jaxpr2(closed)
    from jax._src import flattree  # type: ignore[attr-defined]  # since 0.12

    types = flattree.flatten(([aval.lo_ty() for aval in closed.in_avals], {}))
    return partial_eval.lower_jaxpr_reference(closed, types)[0]


def complete_high_types(lower: Callable[[Any], Any], raise_: Callable[[Any, Any], Any]) -> None:
    """Let primitives of JAX 0.10 to 0.12 take and return values of types that are defined with ``hijax``.

    Arguments:
      lower: returns the array in such a value; ``raise_`` returns the value of a type, given its array. JAX may be
        tracing both.
    """
    stop: Any = ad_util.stop_gradient_p
    stop.is_high, stop.to_lojax = (lambda kind, **_: kind.is_high), (lambda value: value)
    remat: Any = ad_checkpoint.remat_p
    checkpointed = remat.to_lojax
    choose = batching.fancy_primitive_batchers[conditionals.cond_p]

    def checkpointed_and_raised(*args: Any, jaxpr: Any, **params: Any) -> list[Any]:
        results = checkpointed(*args, jaxpr=jaxpr, **params)
        types = [variable.aval for variable in jaxpr.outvars]
        return [raise_(kind, one) if kind.is_high else one for kind, one in zip(types, results, strict=True)]

    def chosen_lowered(axis: Any, args: Any, dims: Any, *, branches: Any, **params: Any) -> Any:
        """Choose for each element of a batch: JAX broadcasts what all elements share, and selects."""
        lowered_args = [lower(one) if core.typeof(one).is_high else one for one in args]
        results, dims = choose(axis, lowered_args, dims, branches=tuple(map(lowered, branches)), **params)
        types = branches[0].out_avals
        return [raise_(kind, one) if kind.is_high else one for kind, one in zip(types, results, strict=True)], dims

    remat.to_lojax = checkpointed_and_raised
    batching.fancy_primitive_batchers[conditionals.cond_p] = chosen_lowered
