"""Collectives of a local world, where workers are threads of one process and read each other's arrays."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdistgrad.data_parallel.collectives.agreeing import Meeting
from jdistgrad.data_parallel.collectives.base import Op
from jdistgrad.data_parallel.collectives.board import Board, missing_ranks, waits_no_longer
from jdistgrad.data_parallel.collectives.host import HostCollectives, combined
from jdistgrad.data_parallel.collectives.posts import LocalPost
from jdistgrad.data_parallel.collectives.routes import Route
from jdistgrad.data_parallel.collectives.world import CollectiveEntry, Seat, WatchedBlock, refuse_processes, seat
from jdistgrad.errors import MissingRanksError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.rpc import trees
from jdistgrad.rpc.worker import Worker

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
        refuse_processes()
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
        """Return the values of all ranks in a round."""
        entry = CollectiveEntry(what, self._group, turn)
        with WatchedBlock(self._seat.owner, entry, self.world_ranks, blocking=False) as together:

            def check() -> None:
                self._seat.check()
                together.check()

            try:
                return self._board.collect(turn, timeout, check, what)
            except MissingRanksError as error:
                if self.rank in error.missing:
                    patient = next(rank for rank in range(self.size) if rank not in error.missing)
                    raise waits_no_longer(what, patient, timeout) from None
                places = together.places(error.missing)
                raise missing_ranks(what, error.missing, timeout, places) from None

    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        flat = memory.reshape(-1)
        shared = self._exchange(f"a {op} of {memory.dtype}[{flat.size}]", (flat, _Lazy(flat)))
        total = shared[0][1].memory
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

    def post(self, timeout: Callable[[], float]) -> LocalPost:
        return LocalPost(self._board.letters, self._seat, self._group, self.world_ranks, self.rank, timeout)

    def free(self) -> None:
        """Do nothing: the board goes with the last of the ranks' objects."""

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange("a gather of objects", value)


class _Lazy:
    """Memory for a result, allocated on first use: all ranks use rank 0's only."""

    def __init__(self, like: np.ndarray):
        self._like, self._lock = like, threading.Lock()
        self._memory: np.ndarray | None = None

    @property
    def memory(self) -> np.ndarray:
        with self._lock:
            if self._memory is None:
                self._memory = np.empty_like(self._like)
            return self._memory
