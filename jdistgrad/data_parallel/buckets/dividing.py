"""Division by a number of ranks: with the same bits in compiled code as from Python.

XLA turns a division by a constant into a multiplication by its rounded reciprocal. So here it divides by what it cannot
know, because it depends on the array. A primitive of its own keeps the division linear for JAX.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

divide_p = Primitive("divide_as_numpy")


def divided(x: Any, by: float) -> jax.Array:
    """Return ``x / by``, as NumPy divides."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array / by
    found: jax.Array = divide_p.bind(array, by=by)
    return found


@functools.partial(jax.jit, static_argnames="by")
def _at_once(x: jax.Array, *, by: float) -> jax.Array:
    return _in_program(x, by=by)


def _in_program(x: jax.Array, *, by: float) -> jax.Array:
    divisor = jnp.asarray(by, x.dtype)
    if jnp.iscomplexobj(x):  # NumPy multiplies too
        return x / divisor
    return x / jnp.where(jnp.isnan(x), 1, divisor)


divide_p.def_impl(_at_once)
divide_p.def_abstract_eval(lambda x, by: x)
ad.deflinear2(divide_p, lambda g, _, by: [divide_p.bind(g, by=by)])
batching.defvectorized(divide_p)
mlir.register_lowering(divide_p, mlir.lower_fun(_in_program, multiple_results=False))
