"""The interface of the collectives, and their derivatives, which are the same for all implementations.

A collective is differentiated as part of the *sum of all ranks' results*: every rank's use of its result counts. So the
transpose of an allreduce is an allreduce of the cotangents; of a broadcast, their sum on the root; of an allgather, on
each rank the sum of all ranks' cotangents of that rank's row. With ``J`` the operation on the inputs of all ranks
together, ``<y, J x> = <J' y, x>`` summed over ranks. A loss that every rank computes alike is counted ``size`` times:
differentiate ``loss / size``.
"""

import abc
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Op = Literal["sum", "max", "min"]


class Collectives(abc.ABC):
    """Operations that every rank of a group must call, in the same order, with the same shapes and dtypes.

    The operations take concrete arrays as well as traced ones (in ``jit``, ``grad``, ``vmap``).
    """

    rank: Any
    size: int
    has_room: bool = True  # whether overlap pays here

    def allreduce(self, x: Any, op: Op = "sum") -> jax.Array:
        """Return the sum (or ``"max"``, ``"min"``) over all ranks. Every rank must call it; all get the same result.

        The transpose of a sum is the sum of all ranks' cotangents; of a maximum, that sum on the ranks that hold the
        maximum, in equal shares.
        """
        return _sum(self, _checked(x, op)) if op == "sum" else _extreme(self, op, _checked(x, op))

    def broadcast(self, x: Any, root: int = 0) -> jax.Array:
        """Return the root's array. Every rank must call it. Transpose: the cotangents' sum on the root, 0 elsewhere."""
        return _broadcast(self, self._checked_root(root), jnp.asarray(x))

    def allgather(self, x: Any) -> jax.Array:
        """Return all ranks' arrays, stacked by rank. Every rank must call it.

        Transpose: this rank's row of the sum of all cotangents.
        """
        return _allgather(self, jnp.asarray(x))

    def _checked_root(self, root: int) -> int:
        if not isinstance(root, int | np.integer) or not 0 <= root < self.size:
            raise ValueError(f"broadcast: the root must be a rank from 0 to {self.size - 1}, not {root!r}")
        return root

    def gather_same(self, x: Any) -> jax.Array:
        """Apply ``allgather``, with a result that JAX knows to be the same on all ranks."""
        return self.allgather(x)

    def localize(self, x: Any) -> Any:
        """Return a replicated value as this rank's own, so that its gradient is that of this rank's loss alone."""
        return x

    def is_summed(self, gradient: Any) -> bool:
        """Return whether JAX has already summed a cotangent over the ranks, as it may on a mesh."""
        return False

    # What an implementation must have:

    @abc.abstractmethod
    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """Apply the operation of this name, at once or as part of a compiled program."""


def _checked(x: Any, op: str) -> jax.Array:
    if op not in ("sum", "max", "min"):
        raise ValueError(f"allreduce: op must be 'sum', 'max' or 'min', not {op!r}")
    array = jnp.asarray(x)
    if array.dtype == bool or (op != "sum" and jnp.issubdtype(array.dtype, jnp.complexfloating)):
        raise TypeError(f"allreduce: no {op} of {array.dtype}. Cast it, for example to int32.")
    return array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(collectives: Collectives, x: jax.Array) -> jax.Array:
    return collectives.perform("sum", x)


_sum.defvjp(lambda c, x: (_sum(c, x), None), lambda c, _, g: (_sum(c, g),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _extreme(collectives: Collectives, op: str, x: jax.Array) -> jax.Array:
    return collectives.perform(op, x)


def _extreme_backward(collectives: Collectives, op: str, at: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    share, total = at.astype(g.dtype), g if collectives.is_summed(g) else collectives.allreduce(g)
    return (total * share / collectives.allreduce(share),)


def _extreme_forward(collectives: Collectives, op: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _extreme(collectives, op, x)
    return y, x == y


_extreme.defvjp(_extreme_forward, _extreme_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _broadcast(collectives: Collectives, root: int, x: jax.Array) -> jax.Array:
    return collectives.perform("broadcast", x, root)


def _broadcast_backward(collectives: Collectives, root: int, _: None, g: jax.Array) -> tuple[jax.Array]:
    total = _sum(collectives, g)
    return (jnp.where(collectives.rank == root, total, jnp.zeros_like(total)),)


_broadcast.defvjp(lambda c, root, x: (_broadcast(c, root, x), None), _broadcast_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _allgather(collectives: Collectives, x: jax.Array) -> jax.Array:
    return collectives.perform("allgather", x)


_allgather.defvjp(lambda c, x: (_allgather(c, x), None), lambda c, _, g: (_sum(c, g)[c.rank],))
