"""What every body of the collectives offers, and the derivatives, which are the same for all.

The derivative of an operation of all ranks is taken of the *sum of all ranks' results*: what each rank does with what
it got counts. So the transpose of an allreduce is an allreduce of the cotangents, that of a broadcast their sum on the
root, that of an allgather the sum of what all ranks send back to one. With ``J`` the operation on all ranks' inputs
together, ``<y, J x> = <J' y, x>`` summed over ranks. Where every rank computes the same loss, it is counted ``size``
times: differentiate ``loss / size``.
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

    They take concrete arrays as well as traced ones (in ``jit``, ``grad``, ``vmap``).
    """

    rank: Any
    size: int
    has_room: bool = True  # whether overlap pays here

    def allreduce(self, x: Any, op: Op = "sum") -> jax.Array:
        """The sum (or ``"max"``, ``"min"``) over all ranks. Every rank must call it; all get the same.

        The transpose of a sum is the sum of all ranks' cotangents; of a maximum, that sum where the maximum was,
        divided among equals.
        """
        return _sum(self, _checked(x, op)) if op == "sum" else _extreme(self, op, _checked(x, op))

    def broadcast(self, x: Any, root: int = 0) -> jax.Array:
        """What the root has. Every rank must call it. The transpose: all cotangents' sum on the root, 0 elsewhere."""
        return _broadcast(self, self._checked_root(root), jnp.asarray(x))

    def allgather(self, x: Any) -> jax.Array:
        """Everybody's array, stacked by rank. Every rank must call it. Transpose: this rank's row of their sum."""
        return _allgather(self, jnp.asarray(x))

    def _checked_root(self, root: int) -> int:
        if not isinstance(root, int | np.integer) or not 0 <= root < self.size:
            raise ValueError(f"broadcast: the root must be a rank from 0 to {self.size - 1}, not {root!r}")
        return root

    def gather_same(self, x: Any) -> jax.Array:
        """``allgather`` whose result JAX knows to be the same on all ranks."""
        return self.allgather(x)

    def localize(self, x: Any) -> Any:
        """A value that is the same on all ranks, as this rank's own: its gradient is of this rank's loss alone."""
        return x

    def is_summed(self, gradient: Any) -> bool:
        """Whether JAX has summed a cotangent over the ranks already: on a mesh it may."""
        return False

    # What a body must have:

    @abc.abstractmethod
    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """The operation of this name, now or as a part of a program."""


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
