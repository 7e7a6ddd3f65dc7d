"""How arrays of several ranks are combined, and divided by the number of ranks.

XLA turns a division by a constant into a multiplication by its rounded reciprocal. So that compiled code gets the bits
that Python gets, it divides by what XLA cannot know, because it depends on the array. A primitive of its own keeps the
division linear for JAX.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def widened(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which numbers are added: small floats in 32 bits."""
    return np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind not in "iub" else dtype


def combined(parts: Sequence[np.ndarray] | np.ndarray, op: str) -> np.ndarray:
    """Combine in the order of the ranks, so that all ranks get the same bits; small floats are combined in 32 bits."""
    wide = widened(parts[0].dtype)
    result = parts[0].astype(wide)
    for part in parts[1:]:
        COMBINE[op](result, part.astype(wide, copy=False), out=result)
    return result


divide_p = Primitive("divide_as_numpy")


def divided(x: Any, by: float) -> jax.Array:
    """Return ``x / by``, as NumPy divides."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array / by
    found: jax.Array = divide_p.bind(array, by=by)
    return found


def _in_program(x: jax.Array, *, by: float) -> jax.Array:
    divisor = jnp.asarray(by, x.dtype)
    if jnp.iscomplexobj(x):  # NumPy multiplies too
        return x / divisor
    return x / jnp.where(jnp.isnan(x), 1, divisor)


divide_p.def_impl(jax.jit(_in_program, static_argnames="by"))
divide_p.def_abstract_eval(lambda x, by: x)
ad.deflinear2(divide_p, lambda g, _, by: [divide_p.bind(g, by=by)])
batching.defvectorized(divide_p)
mlir.register_lowering(divide_p, mlir.lower_fun(_in_program, multiple_results=False))
