"""Pending calls and their deadlines: a state machine without clock or I/O."""

import collections
import dataclasses
import math
import threading
from typing import Any

from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import describe


@dataclasses.dataclass(slots=True, eq=False)
class Pending:
    """A pending call: one that has been sent and not answered.

    Attributes:
      context: the id of the scope it was made in, or None.
      thread: the thread that made it.
    """

    id: int
    peer: WorkerInfo
    caller: WorkerInfo
    function: Any
    timeout: float
    deadline: float
    future: Any
    since: float = 0.0
    context: int | None = None
    thread: int = 0

    def __str__(self) -> str:
        return f"{describe(self.function)} on {self.peer}, called by {self.caller}"


class PendingCalls:
    """The table of pending calls. Every call leaves it exactly once: answered, expired or failed.

    Each timeout has a queue of its own, in which deadlines are in order: opening, answering and finding an expired call
    take constant time, and an answered call leaves nothing behind.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Pending] = {}
        self._queues: dict[float, collections.OrderedDict[int, Pending]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, call: Pending) -> None:
        with self._lock:
            self._by_id[call.id] = call
            if call.timeout != math.inf:
                self._queues.setdefault(call.timeout, collections.OrderedDict())[call.id] = call

    def close(self, identifier: int) -> Pending | None:
        """Remove and return a call, or None if it is no longer there (late answer)."""
        with self._lock:
            call = self._by_id.get(identifier)
            return None if call is None else self._remove(call)

    def overdue(self, now: float) -> list[Pending]:
        """Return, of each timeout, the call whose deadline has passed longest ago."""
        with self._lock:
            first = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        return [call for call in first if call.deadline <= now]

    def expire(self, now: float) -> list[Pending]:
        """Remove and return every call whose deadline has passed."""
        expired = []
        with self._lock:
            for timeout, queue in list(self._queues.items()):
                while queue and next(iter(queue.values())).deadline <= now:
                    expired.append(self._remove(next(iter(queue.values()))))
                if not queue:
                    del self._queues[timeout]
        return expired

    def close_all(self, peer: int | None = None) -> list[Pending]:
        """Remove and return every call, or every call to one peer."""
        with self._lock:
            calls = [call for call in self._by_id.values() if peer is None or call.peer.rank == peer]
            return [self._remove(call) for call in calls]

    def now(self) -> list[Pending]:
        """Return all calls, without the lock: a thread that stands still may hold it."""
        return list(self._by_id.values())

    def peers(self) -> set[int]:
        """Return the ranks of the peers that owe an answer."""
        with self._lock:
            return {call.peer.rank for call in self._by_id.values()}

    def _remove(self, call: Pending) -> Pending:
        del self._by_id[call.id]
        if call.timeout != math.inf:
            del self._queues[call.timeout][call.id]
        return call
