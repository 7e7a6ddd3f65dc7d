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
from jdistgrad.data_parallel.collectives.host import HostCollectives, combined, described
from jdistgrad.data_parallel.collectives.primitive import Route
from jdistgrad.data_parallel.collectives.roll_call import Meeting, missing_ranks, require_same_texts, waits_no_longer
from jdistgrad.data_parallel.collectives.send_recv import Check, Peer, wait_for_letter
from jdistgrad.data_parallel.collectives.world import FOR_ANY_WORLD, CollectiveEntry, WatchedBlock, is_local
from jdistgrad.errors import CollectiveError, MissingRanksError, WorldClosedError
from jdistgrad.ffi.dispatch import finish_programs
from jdistgrad.rpc import trees
from jdistgrad.rpc.worker import Worker, current_worker
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
        require_same_texts([pinned[rank][0] for rank in range(self.size)])
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
_lock = threading.Lock()


class Local(HostCollectives):
    """Collectives with workers of the current local world as ranks.

    Every worker must make its ``Local`` objects in the same order: the k-th of each belong together.

    Arguments:
      workers: the world ranks of the participants; default all.
    """

    world_ranks: tuple[int, ...]

    def __init__(self, workers: Sequence[int] | None = None) -> None:
        worker = current_worker()
        if not is_local(worker):
            raise CollectiveError(
                f"collectives of threads, made by {worker.info}: this world's workers are processes, and none would "
                f"meet another one. {FOR_ANY_WORLD}"
            )
        self._join(worker, tuple(range(worker.size) if workers is None else workers))

    def _join(self, worker: Worker, workers: tuple[int, ...]) -> None:
        self._found, self._info, self.world_ranks = weakref.ref(worker), worker.info, workers
        self.rank, self.size = workers.index(worker.rank), len(workers)
        with _lock:
            turns = worker.kept.setdefault("local collectives", collections.Counter[Any]())
            turns[workers] += 1
            self.name = (workers, turns[workers])
            self._board = _boards.setdefault((worker.world, *self.name), Board(self.size))

    def __repr__(self) -> str:
        return f"Local(rank={self.rank}, size={self.size})"

    def keeper(self) -> Worker:
        """Return this rank's worker. Raises its world's error, or WorldClosedError, once it has failed or closed."""
        worker = self._found()  # JAX keeps programs, and they their collectives, which must not keep the worker
        if worker is not None and worker.failure is not None:
            raise worker.failure.with_traceback(None)
        if worker is None or worker.closed:
            raise WorldClosedError(
                f"collectives of {self._info}: their world has been shut down. Make new ones in this one.",
                worker=self._info,
            )
        return worker

    def twin(self) -> "Local":
        other = object.__new__(Local)
        other.timeout = self.timeout
        other._join(self.keeper(), self.world_ranks)
        return other

    def agree(self, text: str) -> None:
        finish_programs()  # which meet at the same board
        super().agree(text)

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self.keeper()
        return self._collect(self._board.pin(self.rank, what, value), what, self.timeout)

    def announce(self, word: bytes, what: str) -> Meeting:
        self.keeper()
        turn = self._board.pin(self.rank, "a meeting", word)
        return functools.partial(self._collect, turn, what)

    def _collect(self, turn: int, what: str, timeout: float) -> list[Any]:
        entry = CollectiveEntry(what, self.name, turn)
        with WatchedBlock(self.keeper(), entry, self.world_ranks, blocking=False) as together:

            def check() -> None:
                self.keeper()
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

    def moved(self, name: str, memory: np.ndarray, how: Any) -> np.ndarray:
        shared = self._exchange(described(name, memory, how), memory)
        if name == "allgather":
            found = np.stack(shared)
        elif isinstance(how, Route):
            _, source = how.ends(self.rank)
            found = np.zeros_like(memory) if source is None else np.array(shared[source])
        elif name == "alltoall":
            found = np.stack([theirs[self.rank] for theirs in shared])
        else:
            rows = slice(len(memory) // self.size * self.rank, len(memory) // self.size * (self.rank + 1))
            found = combined([theirs[rows] for theirs in shared], "sum").astype(memory.dtype, copy=False)
        self._exchange(f"the end of {name}", None)
        return found

    def _gathered(self, text: str, value: Any) -> list[Any]:
        return [trees.steady(one) for one in super()._gathered(text, trees.steady(value))]

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange("a gather of objects", value)

    def send_letter(self, x: np.ndarray, words: str, peer: Peer) -> None:
        self.keeper()
        octets = np.frombuffer(bytes_of(np.array(x)), np.uint8)
        self._board.put(self.rank, peer.rank, peer.tag, (words, octets))

    def take_letter(self, peer: Peer) -> Letter:
        found: list[Letter] = []

        def wait(seconds: float, check: Check) -> bool:
            def both() -> None:
                self.keeper()
                check()

            found.extend(self._board.next(peer.rank, self.rank, peer.tag, seconds, both))
            return bool(found)

        wait_for_letter(self, peer, time.monotonic() + self.timeout, wait)
        return found[0]
