"""The collectives of processes and threads as a JAX primitive: its derivatives, its form under vmap, its lowering.

All operations but the maximum and the minimum are linear, so the rules below are all that JAX needs for derivatives of
any order, in both modes, and in loops. A rank that does not use a result performs the transpose too, with zeros, since
other ranks may use theirs; but JAX drops an operation without use where it differentiates a loop.

It has the ordered effect of the implementation, so XLA runs operations, and their transposes, in the program's order.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

collective_p = Primitive("collective")


class Performer(Protocol):
    """What performs operations: at once on concrete arrays, or as parts of a program."""

    rank: Any
    size: int

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array: ...

    def eager(self, name: str, x: jax.Array, how: Any = None) -> jax.Array: ...

    def traced(self, name: str, x: jax.Array, how: Any = None) -> jax.Array: ...


def _at_once(x: jax.Array, *, by: Performer, name: str, how: Any) -> jax.Array:
    return by.eager(name, x, how)


def _in_program(x: jax.Array, *, by: Performer, name: str, how: Any) -> jax.Array:
    return by.traced(name, x, how)


def _shape(x: Any, *, by: Performer, name: str, how: Any) -> tuple[Any, Any]:
    closed = jax.make_jaxpr(functools.partial(_in_program, by=by, name=name, how=how))(x)
    return closed.out_avals[0], closed.effects


def _gathered_back(by: Performer, _: Any, g: jax.Array) -> jax.Array:
    return by.perform("sum", g)[by.rank]


def _broadcast_back(by: Performer, root: int, g: jax.Array) -> jax.Array:
    total = by.perform("sum", g)
    return jnp.where(by.rank == root, total, jnp.zeros_like(total))


def _scattered_back(by: Performer, _: Any, g: jax.Array) -> jax.Array:
    return by.perform("allgather", g).reshape(by.size * len(g), *g.shape[1:])


TRANSPOSES: dict[str, Callable[[Performer, Any, jax.Array], jax.Array]] = {
    "sum": lambda by, _, g: by.perform("sum", g),
    "broadcast": _broadcast_back,
    "allgather": _gathered_back,
    "alltoall": lambda by, _, g: by.perform("alltoall", g),
    "scatter": _scattered_back,
    "shift": lambda by, route, g: by.perform("shift", g, route.reversed()),
    "permute": lambda by, route, g: by.perform("permute", g, route.reversed()),
}


def _transpose(g: Any, _: Any, *, by: Performer, name: str, how: Any) -> list[jax.Array]:
    return [TRANSPOSES[name](by, how, ad.instantiate_zeros(g))]


def _batched(args: Any, axes: Any, *, by: Performer, name: str, how: Any) -> tuple[jax.Array, int]:
    """Apply one operation to the whole batch.

    The batch's axis comes first, or second where rows are exchanged: JAX has it wherever this rank's own program left
    it, and the other ranks' programs may have left theirs elsewhere.
    """
    (x,), (axis,) = args, axes
    if name in ("alltoall", "scatter"):
        return by.perform(name, jnp.moveaxis(x, axis, 1), how), 1
    found = by.perform(name, jnp.moveaxis(x, axis, 0), how)
    if name == "send":  # what it returns has no axis
        found = jnp.broadcast_to(found, (x.shape[axis],))
    return found, 1 if name == "allgather" else 0


collective_p.def_impl(_at_once)
collective_p.def_effectful_abstract_eval(_shape)
ad.deflinear2(collective_p, _transpose)
ad.primitive_transposes[collective_p] = _transpose  # deflinear2's own omits it where the result is not used
batching.primitive_batchers[collective_p] = _batched
mlir.register_lowering(collective_p, mlir.lower_fun(_in_program, multiple_results=False))
