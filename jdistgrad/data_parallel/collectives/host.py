"""Collectives of processes or threads, which meet, agree on each operation, and reduce in host memory."""

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdistgrad.data_parallel.buckets.host_arrays import any_traced, like
from jdistgrad.data_parallel.collectives.agreeing import Agreeing, Meeting
from jdistgrad.data_parallel.collectives.base import Collectives, Op
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.lowering import call_in_order, on_cpus

TIMEOUT = 300.0
COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class HostCollectives(Collectives):
    """Collectives on host memory, which Python can also call on concrete arrays."""

    rank: int
    timeout: float = TIMEOUT
    meets_in_programs: bool = True  # whether ranks meet before the operations of compiled programs
    turn: int = 0  # the number of operations so far; with the group it identifies an operation to the watchdog
    refusal: CollectiveError | None = None  # why these collectives refuse further use, if they do

    def perform(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        return _batchable(self, name, root)(x) if any_traced(x) else self.eager(name, x, root)

    # On concrete arrays, after an agreement: without it a mistake would give wrong sums.

    def eager(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        self.agree(described(name, x, root))
        memory = self.on_host(name, x, root)
        spread = name == "allgather" and len(x.devices()) > 1  # the sharding of x has no axis for the ranks
        return jnp.asarray(memory) if spread else like(memory, x)

    def on_host(self, name: str, x: Any, root: int) -> np.ndarray:
        """Return the operation of this name applied to a concrete array, in new memory."""
        if name == "allgather":
            return self.gather_arrays(np.asarray(x))
        memory = np.array(x, order="C")  # reduced through a flat view
        if name == "broadcast":
            self.broadcast_in_place(memory, root)
        else:
            self.reduce_in_place(memory, name)  # type: ignore[arg-type]
        return memory

    def agree(self, text: str) -> None:
        """Raise DisagreementError on every rank unless all announce the same text. Every rank must call it."""
        Agreeing(self, text)(self.timeout)

    # In compiled programs, where the ranks agree once, at the beginning of a section.

    @contextlib.contextmanager
    def section(self, what: str) -> Iterator["HostCollectives"]:
        """Trace a block of operations that the ranks agree on once, before the first; yield collectives for the block.

        Sections are not nested: the yielded collectives do not agree again and open none.
        """
        if not self.meets_in_programs or self.size == 1:
            yield self
            return
        quiet = self._opened(what)
        quiet.meets_in_programs = False
        yield quiet
        self._end()

    def adjusted(self, *, timeout: float, meets_in_programs: bool) -> "HostCollectives":
        """Return a copy with other settings, which uses the same channels."""
        other = copy.copy(self)
        other.timeout, other.meets_in_programs = timeout, meets_in_programs
        return other

    def traced(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """Apply the operation of this name to a tracer."""
        with self.section(described(name, x, root)) as all_:
            return all_.compiled(name, x, root)

    # What an implementation must have. On host memory, called by one thread at a time:

    @abc.abstractmethod
    def twin(self) -> "HostCollectives":
        """Return the same group over a channel of its own. Every rank must call it."""

    @abc.abstractmethod
    def announce(self, word: bytes, what: str) -> Meeting:
        """Begin a meeting with this rank's word. The words of all ranks have one length."""

    @abc.abstractmethod
    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        """Overwrite contiguous memory with its reduction over all ranks."""

    @abc.abstractmethod
    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        """Overwrite every rank's contiguous memory with the root's."""

    @abc.abstractmethod
    def gather_arrays(self, memory: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks, which have one shape, stacked by rank."""

    @abc.abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""

    # Inside jit. Here programs call Python for each operation; an implementation may have a way of its own.

    def compiled(self, name: str, x: jax.Array, root: int) -> jax.Array:
        """Apply the operation of this name to a tracer, inside a section."""
        shape = (self.size, *x.shape) if name == "allgather" else x.shape
        result, channel = jax.ShapeDtypeStruct(shape, x.dtype), self.of_programs()
        if not on_cpus():
            return io_callback(lambda x: channel.on_host(name, x, root), result, x, ordered=True)
        (made,) = call_in_order(lambda x: [channel.on_host(name, x, root)], [result], x, effect=in_order())
        return made

    def of_programs(self) -> "HostCollectives":
        """Return the same group, over the channel that compiled programs use."""
        return self

    def _opened(self, what: str) -> "HostCollectives":
        """Add the agreement on a section to the program; return a copy of these collectives for its operations."""
        channel, timeout = self.of_programs(), self.timeout

        def agree() -> None:
            Agreeing(channel, f"compiled {what}")(timeout)

        if on_cpus():
            call_in_order(agree, (), effect=in_order())
        else:
            io_callback(agree, None, ordered=True)
        return copy.copy(self)

    def _end(self) -> None:
        """Add the end of the section to the program: nothing, since each operation has waited for all ranks."""


@functools.cache
def in_order() -> Any:
    """Return the effect of callbacks that run in the program's order."""
    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects
    return effect


def described(name: str, x: Any, root: int) -> str:
    """Describe an operation in the words that the ranks compare."""
    return f"{name} of {x.dtype}{list(x.shape)}" + (f" from rank {root}" if name == "broadcast" else "")


def _batchable(collectives: HostCollectives, name: str, root: int) -> Callable[[jax.Array], jax.Array]:
    """Return the operation as a function that vmap turns into one operation on the whole batch."""

    @jax.custom_batching.custom_vmap
    def call(x: jax.Array) -> jax.Array:
        return collectives.traced(name, x, root)

    @call.def_vmap
    def batched(axis_size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        y = collectives.perform(name, x, root)
        return (jnp.moveaxis(y, 1, 0) if name == "allgather" and in_batched[0] else y), in_batched[0]

    return call
