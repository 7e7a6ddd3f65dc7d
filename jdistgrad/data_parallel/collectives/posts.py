"""What carries arrays from one rank to another: letters of an array and its type, in order for each tag.

The sender does not wait. The receiver waits until its timeout, and no longer than the sender lives.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jdistgrad.data_parallel.collectives.board import Letter, Letters
from jdistgrad.data_parallel.collectives.communicators import keep_until_ended
from jdistgrad.data_parallel.collectives.world import CollectiveEntry, WatchedBlock, raise_lost
from jdistgrad.errors import DisagreementError, MissingRanksError
from jdistgrad.rpc.worker import find_worker
from jdistgrad.wire.arrays import bytes_of
from jdistgrad.wire.polling import poll

TAGS = 1000
FIRST_TAG = 31_076  # of MPI's: those below belong to other operations, and 32,767 are always there


class Post(Protocol):
    def send(self, x: np.ndarray, to: int, tag: int) -> None: ...

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int, tag: int) -> np.ndarray:
        """Return the next array from a rank.

        Raises:
          MissingRanksError: no array has come in time.
          DisagreementError: it has another type. The array is lost.
          WorkerLostError: the sender is lost.
        """


def type_in_words(shape: Sequence[int], dtype: Any) -> str:
    return f"{dtype}{list(shape)}"


class _Wait:
    """A receiver's wait for a letter, of which the watchdog knows."""

    def __init__(self, group: Any, ranks: Sequence[int], me: int, source: int, tag: int, timeout: float):
        self._source, self._timeout = source, timeout
        self.what = f"recv from rank {source}" + (f" with tag {tag}" if tag else "")
        entry = CollectiveEntry(self.what, (group, source, me, tag), 0)
        self._block = WatchedBlock(find_worker(), entry, [ranks[me], ranks[source]], blocking=False)

    def until(self, wait: Callable[[Callable[[], None]], bool]) -> None:
        """Wait by a function of a check that raises if nothing will come, and that returns whether all has come."""
        with self._block as block:
            if wait(block.check):
                return
            places = block.places([1])  # of the block's two ranks
            where = f" (it is at {places[1]})" if places else ""
            text = (
                f"{self.what}: nothing has come within {self._timeout:g} s{where}. For each recv, and each derivative "
                "of a send, the other rank has to send: what it got must depend on what it differentiates (recv's "
                "after=), and what its send returned must be part of its loss."
            )
            text += block.told(text)
        raise MissingRanksError(text, missing=[self._source], seconds=self._timeout)

    def check_type(self, sent: str, expected: str) -> None:
        if sent != expected:
            raise DisagreementError(
                f"{self.what}: expected {expected}, but rank {self._source} sent {sent}. recv(like, ...) takes arrays, "
                "or jax.ShapeDtypeStruct, of the shapes and dtypes that are sent, in the same order.",
                rank=self._source,
            )


class LocalPost:
    """The post of a rank that is a thread. ``check`` raises once its world has failed or closed."""

    def __init__(
        self,
        letters: Letters,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        timeout: Callable[[], float],
        check: Callable[[], None],
    ):
        self._letters, self._group, self._ranks, self._rank = letters, group, ranks, rank
        self._timeout, self._check = timeout, check

    def send(self, x: np.ndarray, to: int, tag: int) -> None:
        self._check()
        self._letters.put(self._rank, to, tag, Letter(type_in_words(x.shape, x.dtype), np.array(x)))

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int, tag: int) -> np.ndarray:
        timeout = self._timeout()
        wait = _Wait(self._group, self._ranks, self._rank, source, tag, timeout)

        def until(check: Callable[[], None]) -> bool:
            def both() -> None:
                self._check()
                check()

            return self._letters.wait(source, self._rank, tag, timeout, both)

        wait.until(until)
        sent, found = self._letters.take(source, self._rank, tag)
        wait.check_type(sent, type_in_words(shape, dtype))
        return found


class MPIPost:
    """The post of a rank of an MPI communicator: of each array first its type, then its bytes."""

    def __init__(self, comm: Any, group: Any, ranks: Sequence[int], timeout: Callable[[], float]):
        self._comm, self._group, self._ranks, self._timeout = comm, group, ranks, timeout

    def send(self, x: np.ndarray, to: int, tag: int) -> None:
        from jdistgrad.wire.mpi_pieces import chunks

        octets = bytes_of(np.array(x))  # of a copy: nobody waits until it has gone
        words = f"{octets.nbytes} {type_in_words(x.shape, x.dtype)}".encode()
        try:
            for part in (words, *chunks(octets)):
                keep_until_ended(self._comm.Isend(part, to, FIRST_TAG + tag), part)
        except Exception as error:
            raise_lost(error, [self._ranks[to]], f"send to rank {to}")
            raise

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int, tag: int) -> np.ndarray:
        timeout = self._timeout()
        wait = _Wait(self._group, self._ranks, self._comm.rank, source, tag, timeout)
        letter = _Arriving(self._comm, source, FIRST_TAG + tag)
        try:
            wait.until(lambda check: poll(letter.has_come, timeout, check))
        finally:
            letter.leave()
        wait.check_type(letter.type, type_in_words(shape, dtype))
        return letter.octets.view(dtype).reshape(shape)


class _Arriving:
    """A letter over MPI that may be under way."""

    def __init__(self, comm: Any, source: int, tag: int):
        self._comm, self._source, self._tag = comm, source, tag
        self._requests: list[Any] | None = None
        self.type, self.octets = "", np.empty(0, np.uint8)

    def has_come(self) -> bool:
        if self._requests is None:
            self._begin()
        return self._requests is not None and all(request.Test() for request in self._requests)

    def _begin(self) -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        from jdistgrad.wire.mpi_pieces import chunks

        status = mpi.Status()
        matched = self._comm.Improbe(self._source, self._tag, status)
        if matched is None:
            return
        words = bytearray(status.Get_count(mpi.BYTE))
        matched.Recv(words)
        size, _, self.type = words.decode().partition(" ")
        self.octets = np.empty(int(size), np.uint8)
        self._requests = [self._comm.Irecv(part, self._source, self._tag) for part in chunks(self.octets)]

    def leave(self) -> None:
        """Wait no longer. MPI may still write to the memory of what has not come."""
        for request in self._requests or ():
            keep_until_ended(request, self.octets)
