"""Collectives of a local world, where workers are threads of one process and read each other's arrays."""

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdistgrad.data_parallel.collectives.base import Op
from jdistgrad.data_parallel.collectives.host import HostCollectives, combined
from jdistgrad.data_parallel.collectives.primitive import Route
from jdistgrad.data_parallel.collectives.roll_call import Meeting, missing_ranks, waits_no_longer
from jdistgrad.data_parallel.collectives.send_recv import Check, Receiving
from jdistgrad.data_parallel.collectives.world import FOR_ANY_WORLD, CollectiveEntry, Seat, WatchedBlock, is_local, seat
from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.rpc import trees
from jdistgrad.rpc.worker import Worker
from jdistgrad.wire.arrays import bytes_of
from jdistgrad.wire.interrupts import SteadyCondition

LOOK_SECONDS = 0.05  # how often a waiting rank checks whether its world has failed


Letter = tuple[str, np.ndarray]  # words, and bytes


class Board:
    """What ``size`` threads meet at: rounds of exchanges, each rank's k-th in the k-th round, and letters."""

    def __init__(self, size: int):
        self.size = size
        self._turns = [0] * size
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._taken = collections.Counter[int]()
        self._changed = SteadyCondition()
        self._missing: list[int] | None = None
        self._letters = collections.defaultdict[tuple[int, int, int], collections.deque[Letter]](collections.deque)

    def pin(self, rank: int, kind: str, value: Any) -> int:
        """Pin up a value. Return the number of its round, for ``collect``."""
        with self._changed:
            turn, self._turns[rank] = self._turns[rank], self._turns[rank] + 1
            pinned = self._rounds.setdefault(turn, {})
            pinned[rank] = (kind, value)
            if len(pinned) == self.size:
                self._changed.notify_all()
            return turn

    def collect(self, turn: int, timeout: float, check: Callable[[], None]) -> list[Any]:
        """Return the values of all ranks in a round, by rank, once all have come.

        Raises:
          MissingRanksError: some ranks have not come in time, or a rank has given up before: whoever comes later would
            go on alone.
          DisagreementError: not all ranks are in the same kind of exchange.
        """
        end = time.monotonic() + timeout
        with self._changed:
            pinned = self._rounds[turn]
            while len(pinned) < self.size and self._missing is None:
                check()
                if time.monotonic() > end:
                    self._missing = sorted(set(range(self.size)) - set(pinned))
                    self._changed.notify_all()
                else:
                    self._changed.wait(min(LOOK_SECONDS, timeout))
            if self._missing is not None:
                raise MissingRanksError("", missing=self._missing, seconds=timeout)
            self._taken[turn] += 1
            if self._taken[turn] == self.size:
                del self._taken[turn], self._rounds[turn]
        kinds = [pinned[rank][0] for rank in range(self.size)]
        other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise DisagreementError(
                f"the ranks are not in the same operation: rank 0 is in {kinds[0]}, rank {other} in {kinds[other]}. "
                "Every rank must call the same operations in the same order.",
                rank=other,
            )
        return [pinned[rank][1] for rank in range(self.size)]

    def put(self, sender: int, receiver: int, tag: int, letter: Letter) -> None:
        with self._changed:
            self._letters[sender, receiver, tag].append(letter)
            self._changed.notify_all()

    def next(self, sender: int, receiver: int, tag: int, timeout: float, check: Callable[[], None]) -> list[Letter]:
        """Take the next letter; return it, or nothing if none comes in time."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._letters[sender, receiver, tag]:
                check()
                if time.monotonic() > end:
                    return []
                self._changed.wait(min(LOOK_SECONDS, timeout))
            return [self._letters[sender, receiver, tag].popleft()]


_boards: "weakref.WeakValueDictionary[Any, Board]" = weakref.WeakValueDictionary()
_made: "weakref.WeakKeyDictionary[Any, collections.Counter[Any]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Local(HostCollectives):
    """Collectives with workers of the current local world as ranks.

    Every worker must make its ``Local`` objects in the same order: the k-th of each belong together.

    Arguments:
      workers: the world ranks of the participants; default all.
    """

    world_ranks: tuple[int, ...]

    def __init__(self, workers: Sequence[int] | None = None) -> None:
        place = seat()
        if not is_local():
            raise CollectiveError(
                f"collectives of threads, made by {place.info}: this world's workers are processes, and none would "
                f"meet another one. {FOR_ANY_WORLD}"
            )
        self._sit(place, tuple(range(place.size) if workers is None else workers))

    def _sit(self, place: Seat, workers: tuple[int, ...]) -> None:
        self._seat, self.world_ranks = place, workers
        self.rank, self.size = workers.index(place.rank), len(workers)
        with _lock:
            turns = _made.setdefault(place.owner, collections.Counter())
            turns[workers] += 1
            self._group = (workers, turns[workers])
            self._board = _boards.setdefault((place.world, *self._group), Board(self.size))

    def __repr__(self) -> str:
        return f"Local(rank={self.rank}, size={self.size})"

    def keeper(self) -> Worker:
        return self._seat.owner

    def twin(self) -> "Local":
        other = object.__new__(Local)
        other.timeout = self.timeout
        other._sit(self._seat, self.world_ranks)
        return other

    def agree(self, text: str) -> None:
        finish_programs()  # which meet at the same board
        super().agree(text)

    def allgather_object(self, value: Any) -> list[Any]:
        return [trees.steady(one) for one in super().allgather_object(trees.steady(value))]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return trees.steady(super().broadcast_object(trees.steady(value) if self.rank == root else None, root))

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self._seat.check()
        return self._collect(self._board.pin(self.rank, what, value), what, self.timeout)

    def announce(self, word: bytes, what: str) -> Meeting:
        self._seat.check()
        turn = self._board.pin(self.rank, "a meeting", word)
        return Meeting(functools.partial(self._collect, turn, what))

    def _collect(self, turn: int, what: str, timeout: float) -> list[Any]:
        entry = CollectiveEntry(what, self._group, turn)
        with WatchedBlock(self._seat.owner, entry, self.world_ranks, blocking=False) as together:

            def check() -> None:
                self._seat.check()
                together.check()

            try:
                return self._board.collect(turn, timeout, check)
            except MissingRanksError as error:
                if self.rank in error.missing:
                    patient = next(rank for rank in range(self.size) if rank not in error.missing)
                    raise waits_no_longer(what, patient, timeout) from None
                places = together.places(error.missing)
                raise missing_ranks(what, error.missing, timeout, places) from None

    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        flat = memory.reshape(-1)
        result = np.empty_like(flat) if self.rank == 0 else None  # all ranks write to rank 0's
        shared = self._exchange(f"a {op} of {memory.dtype}[{flat.size}]", (flat, result))
        total = shared[0][1]
        mine = slice(flat.size * self.rank // self.size, flat.size * (self.rank + 1) // self.size)
        total[mine] = combined([theirs[mine] for theirs, _ in shared], op)
        self._exchange("the end of a reduction", None)
        flat[:] = total

    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        shared = self._exchange(f"a broadcast of {memory.dtype}{list(memory.shape)}", memory)
        if self.rank != root:
            memory[...] = shared[root]
        self._exchange("the end of a broadcast", None)

    def gather_arrays(self, memory: np.ndarray) -> np.ndarray:
        stacked = np.stack(self._exchange(f"a gather of {memory.dtype}{list(memory.shape)}", memory))
        self._exchange("the end of a gather", None)
        return stacked

    def exchange_blocks(self, memory: np.ndarray) -> np.ndarray:
        shared = self._exchange(f"an exchange of blocks of {memory.dtype}{list(memory.shape)}", memory)
        blocks = np.stack([theirs[self.rank] for theirs in shared])
        self._exchange("the end of an exchange of blocks", None)
        return blocks

    def sum_blocks(self, memory: np.ndarray) -> np.ndarray:
        shared = self._exchange(f"a sum of blocks of {memory.dtype}{list(memory.shape)}", memory)
        total = combined([theirs[self.rank] for theirs in shared], "sum").astype(memory.dtype, copy=False)
        self._exchange("the end of a sum of blocks", None)
        return total

    def pass_on(self, memory: np.ndarray, route: Route) -> np.ndarray:
        shared = self._exchange(f"a move of {memory.dtype}{list(memory.shape)} {route}", memory)
        source = route.source(self.rank)
        found = np.zeros_like(memory) if source is None else np.array(shared[source])
        self._exchange("the end of a move", None)
        return found

    def post(self, timeout: Callable[[], float]) -> "LocalPost":
        return LocalPost(self._board, self._seat, self._group, self.world_ranks, self.rank, timeout)

    def free(self) -> None:
        """Do nothing: the board goes with the last of the ranks' objects."""

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange("a gather of objects", value)


class LocalPost:
    """The post of a rank that is a thread of a local world."""

    def __init__(
        self, board: Board, seat: Seat, group: Any, ranks: Sequence[int], rank: int, timeout: Callable[[], float]
    ):
        self._board, self._seat, self._group, self._ranks, self._rank = board, seat, group, ranks, rank
        self._timeout = timeout

    def send(self, x: np.ndarray, words: str, to: int, tag: int) -> None:
        self._seat.check()
        self._board.put(self._rank, to, tag, (words, np.frombuffer(bytes_of(np.array(x)), np.uint8)))

    def recv(self, words: str, source: int, tag: int) -> np.ndarray:
        owner, timeout = self._seat.owner, self._timeout()
        receiving = Receiving(owner, self._group, self._ranks, self._rank, source, tag, timeout)
        found: list[Letter] = []

        def wait(seconds: float, check: Check) -> bool:
            def both() -> None:
                self._seat.check()
                check()

            found.extend(self._board.next(source, self._rank, tag, seconds, both))
            return bool(found)

        receiving.until(wait)
        sent, octets = found[0]
        receiving.check_words(sent, words)
        return octets
