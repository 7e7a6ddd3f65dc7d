"""Collectives of processes or threads: they meet, agree on what they do, and share the memory of hosts."""

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel.buckets.host_arrays import is_traced, like
from jdistgrad.data_parallel.collectives.agreeing import Agreeing, Meeting
from jdistgrad.data_parallel.collectives.base import Collectives, Op
from jdistgrad.errors import CollectiveError

TIMEOUT = 300.0
COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class HostCollectives(Collectives):
    """Those that Python can call too, on arrays that are there."""

    rank: int
    timeout: float = TIMEOUT
    asks: bool = True  # whether ranks meet before what compiled programs do
    turn: int = 0  # how many operations there have been: a part of what the watchdog knows of each
    apart: CollectiveError | None = None  # why these are not used any more

    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        return _batchable(self, name, root)(x) if is_traced(x) else self.eager(name, x, root)

    # On concrete arrays, with the agreement that keeps mistakes from becoming wrong sums.

    def eager(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        self.agree(described(name, x, root))
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

    def agree(self, text: str) -> None:
        """Raises DisagreementError on every rank unless all say the same. Every rank must call it."""
        Agreeing(self, text)(self.timeout)

    # In compiled programs: there the ranks agree at the beginning of a section, and no more until it ends.

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator["HostCollectives"]:
        """A traced block of operations that the ranks agree on before the first of them; gives those that do not ask.

        Sections are not nested: what asks no more, opens none.
        """
        if not self.asks or self.size == 1:
            yield self
            return
        quiet = self._opened(what)
        quiet.asks = False
        yield quiet
        self._end()

    def adjusted(self, *, timeout: float, asks: bool) -> "HostCollectives":
        """The same channels, used with another patience."""
        other = copy.copy(self)
        other.timeout, other.asks = timeout, asks
        return other

    def traced(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """The operation of this name on a tracer."""
        with self.section(described(name, x, root)) as all_:
            return all_.compiled(name, x, root)

    # What a body must have. On host memory, by one thread at a time:

    @abc.abstractmethod
    def twin(self) -> "HostCollectives":
        """The same group over a channel of its own. Every rank must call it."""

    @abc.abstractmethod
    def announce(self, word: bytes, what: str) -> Meeting:
        """Begin to meet. All words are of one length."""

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
    def compiled(self, name: str, x: jax.Array, root: int) -> jax.Array:
        """The operation of this name on a tracer, inside a section."""

    @abc.abstractmethod
    def _opened(self, what: str) -> "HostCollectives":
        """Add to the program that the ranks agree on a section; a copy of these for its operations."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Add to the program that the section ends."""


def described(name: str, x: Any, root: int) -> str:
    """An operation as the ranks compare it."""
    return f"{name} of {x.dtype}{list(x.shape)}" + (f" from rank {root}" if name == "broadcast" else "")


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
