"""Collectives of processes or threads: they meet, agree on what they do, and share the memory of hosts."""

import abc
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel import rolls
from jdistgrad.data_parallel.arrays import is_traced, like
from jdistgrad.data_parallel.collectives.base import Collectives, Op
from jdistgrad.data_parallel.rolls import Act, Roll
from jdistgrad.errors import DisagreementError

TIMEOUT = 300.0
COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class HostCollectives(Collectives):
    """Those that Python can call too, on arrays that are there."""

    rank: int
    timeout: float = TIMEOUT

    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        return _batchable(self, name, root)(x) if is_traced(x) else self.eager(name, x, root)

    # On concrete arrays, with the agreement that keeps mistakes from becoming wrong sums.

    def eager(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        self.agree(f"{name} of {x.dtype}{list(x.shape)}" + (f" from rank {root}" if name == "broadcast" else ""))
        memory = self.on_host(name, x, root)
        spread = name == "allgather" and len(x.devices()) > 1  # where x lies says nothing of an axis of ranks
        return jnp.asarray(memory) if spread else like(memory, x)

    def on_host(self, name: str, x: Any, root: int) -> np.ndarray:
        """The operation of this name on an array that is there, in memory of its own."""
        if name == "allgather":
            return self.gather_arrays(np.asarray(x))
        memory = np.array(x, order="C")  # reduced through a flat view
        if name == "broadcast":
            self.broadcast_in_place(memory, root)
        else:
            self.reduce_in_place(memory, name)  # type: ignore[arg-type]
        return memory

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
    def twin(self) -> "HostCollectives":
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


def _batchable(collectives: HostCollectives, name: str, root: int) -> Callable[[jax.Array], jax.Array]:
    """The operation, of which vmap makes one on the whole batch."""

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array) -> jax.Array:
        return collectives.traced(name, x, root)

    @call.def_vmap
    def batched(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        y = collectives.perform(name, x, root)
        return (jnp.moveaxis(y, 1, 0) if name == "allgather" and in_batched[0] else y), in_batched[0]

    return call
