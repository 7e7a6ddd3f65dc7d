"""What carries arrays from one rank to another: letters, in order for each tag.

A letter has words that describe an array, which both ranks compare, and the array's bytes. The sender does not wait.
The receiver waits until its timeout, and no longer than the sender lives. A receiver that gives up leaves a letter that
is under way to the next.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jdistgrad.data_parallel.collectives.board import Letter, Letters
from jdistgrad.data_parallel.collectives.communicators import keep_until_ended
from jdistgrad.data_parallel.collectives.world import (
    CollectiveEntry,
    Seat,
    WatchedBlock,
    raise_lost,
    refuse_forked_process,
)
from jdistgrad.errors import DisagreementError, MissingRanksError
from jdistgrad.rpc.worker import find_worker
from jdistgrad.wire.arrays import bytes_of
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.polling import poll

TAGS = 1000
FIRST_TAG = 31_076  # of MPI's: those below belong to other operations, and 32,767 are always there

Check = Callable[[], None]


class Post(Protocol):
    def send(self, x: np.ndarray, words: str, to: int, tag: int) -> None: ...

    def recv(self, words: str, source: int, tag: int) -> np.ndarray:
        """Return the bytes of the next array from a rank.

        Raises:
          MissingRanksError: no array has come in time.
          DisagreementError: it is described by other words. The array is lost.
          WorkerLostError: the sender is lost.
        """


class Receiving:
    """A receiver's wait for a letter, of which the watchdog knows.

    Arguments:
      group: a name of the ranks that is the same on all of them; ``ranks``: as the world counts them.
      me, source: the receiver and the sender, as the group counts them.
    """

    def __init__(self, worker: Any, group: Any, ranks: Sequence[int], me: int, source: int, tag: int, timeout: float):
        self._worker, self._group = worker, (group, source, me, tag)
        self._ranks, self._source, self._end = [ranks[me], ranks[source]], source, time.monotonic() + timeout
        self._timeout = timeout
        self.what = f"recv from rank {source}" + (f" with tag {tag}" if tag else "")

    def until(self, wait: Callable[[float, Check], bool], *, begun: bool = False) -> None:
        """Wait by a function of the seconds left and a check, which raises if nothing will come.

        Arguments:
          begun: whether a part has come. The sender may be elsewhere meanwhile.
        """
        entry = CollectiveEntry(self.what, self._group, 0, may_leave=begun)
        with WatchedBlock(self._worker, entry, self._ranks, blocking=False) as block:
            if wait(self._end - time.monotonic(), block.check):
                return
            places = block.places([1])  # of the block's two ranks
            text = self._too_late("only a part has come" if begun else "nothing has come", places.get(1, ""))
        raise MissingRanksError(text, missing=[self._source], seconds=self._timeout)

    def _too_late(self, what: str, place: str) -> str:
        where = f" (it is at {place})" if place else ""
        return (
            f"{self.what}: {what} within {self._timeout:g} s{where}. For each recv, and each derivative of a send, the "
            "other rank has to send: what it received must depend on what it differentiates (recv's after=), and what "
            "send and recv returned must be part of the losses."
        )

    def check_words(self, sent: str, expected: str) -> None:
        if sent != expected:
            raise DisagreementError(
                f"{self.what}: expected {expected}, but rank {self._source} sent {sent}. recv(like, ...) takes arrays, "
                "or jax.ShapeDtypeStruct, of the shapes and dtypes that are sent, in the same order. Where one rank "
                "differentiates, the other has to.",
                rank=self._source,
            )


class LocalPost:
    """The post of a rank that is a thread of a local world."""

    def __init__(
        self, letters: Letters, seat: Seat, group: Any, ranks: Sequence[int], rank: int, timeout: Callable[[], float]
    ):
        self._letters, self._seat, self._group, self._ranks, self._rank = letters, seat, group, ranks, rank
        self._timeout = timeout

    def send(self, x: np.ndarray, words: str, to: int, tag: int) -> None:
        self._seat.check()
        self._letters.put(self._rank, to, tag, Letter(words, np.frombuffer(bytes_of(np.array(x)), np.uint8)))

    def recv(self, words: str, source: int, tag: int) -> np.ndarray:
        owner, timeout = self._seat.owner, self._timeout()
        receiving = Receiving(owner, self._group, self._ranks, self._rank, source, tag, timeout)
        found: list[Letter] = []

        def wait(seconds: float, check: Check) -> bool:
            def both() -> None:
                self._seat.check()
                check()

            found.extend(self._letters.next(source, self._rank, tag, seconds, both))
            return bool(found)

        receiving.until(wait)
        receiving.check_words(found[0].words, words)
        return found[0].octets


class MPIPost:
    """The post of a rank of an MPI communicator: of each letter first the words, then the bytes."""

    def __init__(self, comm: Any, group: Any, ranks: Sequence[int], timeout: Callable[[], float]):
        self._comm, self._group, self._ranks, self._timeout = comm, group, ranks, timeout
        self._boxes: dict[tuple[int, int], Box] = {}
        self._making, self._sending = threading.Lock(), threading.Lock()

    def send(self, x: np.ndarray, words: str, to: int, tag: int) -> None:
        from jdistgrad.wire.mpi_process import chunks

        refuse_forked_process("send")
        octets = bytes_of(np.array(x))  # of a copy: nobody waits until it has gone
        try:
            with put_off_interrupt(), self._sending:  # of another thread's letter no part may come between
                for part in (f"{octets.nbytes} {words}".encode(), *chunks(octets)):
                    keep_until_ended(self._comm.Isend(part, to, FIRST_TAG + tag), part)
        except Exception as error:
            raise_lost(error, [self._ranks[to]], f"send to rank {to}")
            raise

    def recv(self, words: str, source: int, tag: int) -> np.ndarray:
        refuse_forked_process("recv")
        me, worker, timeout = self._comm.rank, find_worker(), self._timeout()
        receiving = Receiving(worker, self._group, self._ranks, me, source, tag, timeout)
        box = self._box(source, tag)
        receiving.until(lambda seconds, check: poll(lambda: box.lock.acquire(blocking=False), seconds, check))
        try:
            receiving.until(lambda seconds, check: poll(box.has_letter, seconds, check))
            receiving.until(lambda seconds, check: poll(box.is_complete, seconds, check), begun=True)
            sent, octets = box.take()
        finally:
            box.lock.release()
        receiving.check_words(sent, words)
        return octets

    def _box(self, source: int, tag: int) -> "Box":
        with self._making:
            return self._boxes.setdefault((source, tag), Box(self._comm, source, FIRST_TAG + tag))


class Box:
    """The next letter from a rank with a tag, which may be under way. ``lock``: held by its receiver."""

    def __init__(self, comm: Any, source: int, tag: int):
        self._comm, self._source, self._tag = comm, source, tag
        self.lock = threading.Lock()
        self._requests: list[Any] | None = None
        self._words, self._octets = "", np.empty(0, np.uint8)

    def has_letter(self) -> bool:
        """Return whether the words of a letter have come; then receive its bytes."""
        from mpi4py import MPI as mpi  # noqa: N811

        from jdistgrad.wire.mpi_process import chunks

        if self._requests is not None:
            return True
        status = mpi.Status()
        with put_off_interrupt():
            matched = self._comm.Improbe(self._source, self._tag, status)
            if matched is None:
                return False
            words = bytearray(status.Get_count(mpi.BYTE))
            matched.Recv(words)
            size, _, self._words = words.decode().partition(" ")
            self._octets = np.empty(int(size), np.uint8)
            self._requests = [self._comm.Irecv(part, self._source, self._tag) for part in chunks(self._octets)]
        return True

    def is_complete(self) -> bool:
        return self._requests is not None and all(request.Test() for request in self._requests)

    def take(self) -> tuple[str, np.ndarray]:
        """Return the words and the bytes of a complete letter."""
        self._requests = None
        return self._words, self._octets
