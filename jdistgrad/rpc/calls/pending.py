"""Pending calls and their deadlines: a state machine without clock or I/O."""

import collections
import dataclasses
import math
import threading
from typing import Any

from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import describe
from jdistgrad.wire.ids import spell
from jdistgrad.wire.interrupts import InterruptibleFuture


@dataclasses.dataclass(slots=True, eq=False)
class Pending:
    """A pending call: one that has been sent and not answered.

    Attributes:
      context: the id of the scope it was made in, or None.
      thread: the thread that made it.
      bytes: how many its message has; 0 until it has been sent.
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
    bytes: int = 0

    def __str__(self) -> str:
        context = "" if self.context is None else f" in context {spell(self.context)}"
        return f"{describe(self.function)} on {self.peer}, called by {self.caller} as call {spell(self.id)}{context}"


class PendingCalls:
    """The table of pending calls. Every call leaves it exactly once: answered, expired or failed.

    Each timeout has a queue of its own, in which deadlines are in order: opening, answering and finding an expired call
    take constant time, and an answered call leaves nothing behind.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Pending] = {}
        self._queues: dict[float, collections.OrderedDict[int, Pending]] = {}
        self._leaving: InterruptibleFuture[None] | None = None  # somebody waits until a call with a size leaves
        self._lock = threading.Lock()
        self.bytes = 0  # of all calls

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, call: Pending) -> None:
        with self._lock:
            self._by_id[call.id] = call
            if call.timeout != math.inf:
                self._queues.setdefault(call.timeout, collections.OrderedDict())[call.id] = call

    def sent(self, call: Pending, size: int) -> None:
        """Note the size of a call's message, unless the call has been answered since."""
        with self._lock:
            if call.id in self._by_id:
                call.bytes = size
                self.bytes += size

    def leaving(self, limit: float) -> InterruptibleFuture[None] | None:
        """Return a future that is done as soon as a call with a size leaves; None if all have few enough bytes now.

        The future of a call may be done long before the call leaves: when its caller cancels it.
        """
        with self._lock:
            if self.bytes <= limit:
                return None
            self._leaving = self._leaving or InterruptibleFuture()
            return self._leaving

    def close(self, identifier: int) -> Pending | None:
        """Remove and return a call, or None if it is no longer there (late answer)."""
        with self._lock:
            call = self._by_id.get(identifier)
            return None if call is None else self._remove(call)

    def overdue(self, now: float) -> list[Pending]:
        """Return, of each timeout, the call whose deadline has passed longest ago."""
        with self._lock:
            first = [next(iter(queue.values())) for queue in self._queues.values()]
        return [call for call in first if call.deadline <= now]

    def expire(self, now: float) -> list[Pending]:
        """Remove and return every call whose deadline has passed."""
        expired = []
        with self._lock:
            for queue in list(self._queues.values()):
                while queue and next(iter(queue.values())).deadline <= now:
                    expired.append(self._remove(next(iter(queue.values()))))
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
        self.bytes -= call.bytes
        if call.bytes and self._leaving is not None:
            self._leaving.set_result(None)
            self._leaving = None
        if call.timeout != math.inf:
            queue = self._queues[call.timeout]
            del queue[call.id]
            if not queue:
                del self._queues[call.timeout]
        return call
