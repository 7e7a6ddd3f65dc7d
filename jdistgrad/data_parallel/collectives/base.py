"""What every body of the collectives offers, and the derivatives, which are the same for all.

The derivative of an operation of all ranks is taken of the *sum of all ranks' results*: what each rank does with what
it got counts. So the transpose of an allreduce is an allreduce of the cotangents, that of a broadcast their sum on the
root, that of an allgather the sum of what all ranks send back to one. With ``J`` the operation on all ranks' inputs
together, ``<y, J x> = <J' y, x>`` summed over ranks. Where every rank computes the same loss, it is counted ``size``
times: differentiate ``loss / size``.
"""

import abc
import functools
import hashlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel import rolls
from jdistgrad.data_parallel.arrays import is_traced, like
from jdistgrad.data_parallel.rolls import Act, Roll
from jdistgrad.errors import CollectiveError, DisagreementError

Op = Literal["sum", "max", "min"]
TIMEOUT = 300.0


class Collectives(abc.ABC):
    """Operations that every rank of a group must call, in the same order, with the same shapes and dtypes.

    They take concrete arrays as well as traced ones (in ``jit``, ``grad``, ``vmap``).
    """

    rank: Any
    size: int
    timeout: float = TIMEOUT
    has_room: bool = True  # whether something is gained where reductions go beside the computation

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
        """Everybody's array, stacked by rank. Every rank must call it. The transpose: one's row of their sum."""
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

    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """An operation, now, or as a part of a program."""
        return _batchable(self, name, root)(x) if is_traced(x) else self.eager(name, x, root)

    # On concrete arrays, with the agreement that keeps mistakes from becoming wrong sums.

    def eager(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        self.agree(f"{name} of {x.dtype}{list(x.shape)}" + (f" from rank {root}" if name == "broadcast" else ""))
        if name == "allgather":
            return like(self.gather_arrays(np.asarray(x)), x)
        memory = np.array(x)
        if name == "broadcast":
            self.broadcast_in_place(memory, root)
        else:
            self.reduce_in_place(memory, name)  # type: ignore[arg-type]
        return like(memory, x)

    def meet(self, word: bytes, what: str, timeout: float) -> list[bytes]:
        """Everybody's word, once all have come.

        Raises:
          MissingRanksError: on every rank that came, naming those that did not.
        """
        return self.announce(word, what)(timeout)

    def agree(self, text: str) -> None:
        """Raises DisagreementError on every rank unless all say the same. Every rank must call it."""
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        mine = Roll(Act.OPERATE, 0, 0, 0, digest)
        words = [rolls.unpack(word) for word in self.meet(mine.pack(), text, self.timeout)]
        elsewhere = next((rank for rank, its in enumerate(words) if its.act is not Act.OPERATE), None)
        if elsewhere is not None:
            raise rolls.apart(self.rank, mine, elsewhere, words[elsewhere])
        if len(set(words)) > 1:
            said = self.gather_objects(text)
            other = next(rank for rank, its in enumerate(said) if its != said[0])
            raise DisagreementError(
                f"the ranks are not in the same operation: rank 0 does {said[0]}, rank {other} does {said[other]}. "
                "Every rank must call the same operations, in the same order, with the same shapes and dtypes.",
                rank=other,
            )

    # What a body must have. On host memory, by one thread at a time:

    @abc.abstractmethod
    def twin(self) -> "Collectives":
        """The same group over a channel of its own. Every rank must call it."""

    @abc.abstractmethod
    def announce(self, word: bytes, what: str) -> Callable[[float], list[bytes]]:
        """Begin to meet: the wait for everybody's word, within so many seconds. All words are of one length."""

    @abc.abstractmethod
    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        """Put the reduction over all ranks into contiguous memory."""

    @abc.abstractmethod
    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        """Put the root's into everybody's contiguous memory."""

    @abc.abstractmethod
    def gather_arrays(self, memory: np.ndarray) -> np.ndarray:
        """Everybody's array of one shape, stacked by rank."""

    @abc.abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""

    # Inside jit:

    @abc.abstractmethod
    def traced(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """The operation of this name on a tracer."""


def on_no_mesh(what: str) -> CollectiveError:
    return CollectiveError(
        f"{what} needs processes or threads that meet; the ranks of a mesh axis exist only inside jax.shard_map over "
        "that axis, in one program. Call it there, or use collectives of a world (collectives=None)."
    )


def _checked(x: Any, op: str) -> jax.Array:
    if op not in ("sum", "max", "min"):
        raise ValueError(f"allreduce: op must be 'sum', 'max' or 'min', not {op!r}")
    array = jnp.asarray(x)
    if array.dtype == bool or (op != "sum" and jnp.issubdtype(array.dtype, jnp.complexfloating)):
        raise TypeError(f"allreduce: no {op} of {array.dtype}. Cast it, for example to int32.")
    return array


def _batchable(collectives: Collectives, name: str, root: int) -> Callable[[jax.Array], jax.Array]:
    """The operation, of which vmap makes one on the whole batch."""

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array) -> jax.Array:
        return collectives.traced(name, x, root)

    @call.def_vmap
    def batched(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        y = collectives.perform(name, x, root)
        return (jnp.moveaxis(y, 1, 0) if name == "allgather" and in_batched[0] else y), in_batched[0]

    return call


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
