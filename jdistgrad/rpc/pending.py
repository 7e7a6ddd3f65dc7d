"""Pending calls and their deadlines, a state machine without clock or I/O; and the events of calls."""

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from jdistgrad import events
from jdistgrad.events import Event
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.wire.interrupts import InterruptibleFuture
from jdistgrad.wire.message import spell
from jdistgrad.wire.transport import Ending


@dataclasses.dataclass(slots=True, eq=False)
class Pending(Ending):
    """A pending call: one that has been sent and not answered.

    Attributes:
      future: what its caller got; None if the caller waits for the answer itself.
      since: when it was made.
      scope: that in which it was made, or None.
      thread: the thread that made it.
      bytes: how many its message has, if it has a future; 0 until it has been sent.
      outcome: opens the answer, if it has no future and is ``done``: answered, expired or failed.
    """

    id: int
    peer: WorkerInfo
    caller: WorkerInfo
    function: Any
    timeout: float
    deadline: float
    future: Any
    since: float = 0.0
    scope: Any = None
    thread: int = 0
    bytes: int = 0
    outcome: Any = None

    def __str__(self) -> str:
        context = "" if self.scope is None else f" in context {spell(self.scope.id)}"
        return f"{describe(self.function)} on {self.peer}, called by {self.caller} as call {spell(self.id)}{context}"


class PendingCalls:
    """The table of pending calls. Every call leaves it exactly once: answered, expired or failed.

    Opening and answering a call takes constant time. All calls are looked through only when one may have expired.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Pending] = {}
        self.first_deadline = math.inf  # no call expires before; it may be that of a call which has been answered since
        self._leaving: InterruptibleFuture[None] | None = None  # somebody waits until a call with a size leaves
        self._lock = threading.Lock()
        self.bytes = 0  # of all calls

    def __len__(self) -> int:
        return len(self._by_id)

    def open(self, call: Pending) -> None:
        with self._lock:
            self._by_id[call.id] = call
            if call.deadline < self.first_deadline:
                self.first_deadline = call.deadline

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
            call = self._by_id.pop(identifier, None)
            if call is not None and call.bytes:
                self._left(call)
            return call

    def expire(self, now: float) -> list[Pending]:
        return self._remove(lambda call: call.deadline <= now)

    def close_all(self, peer: int | None = None) -> list[Pending]:
        return self._remove(lambda call: peer is None or call.peer.rank == peer)

    def now(self) -> list[Pending]:
        """Return all calls, without the lock: a thread that hangs may hold it."""
        return list(self._by_id.values())

    def peers(self) -> set[int]:
        with self._lock:
            return {call.peer.rank for call in self._by_id.values()}

    def _remove(self, ends: Callable[[Pending], bool]) -> list[Pending]:
        with self._lock:
            calls = [call for call in self._by_id.values() if ends(call)]
            for call in calls:
                del self._by_id[call.id]
                self._left(call)
            self.first_deadline = min((call.deadline for call in self._by_id.values()), default=math.inf)
            return calls

    def _left(self, call: Pending) -> None:
        self.bytes -= call.bytes
        if call.bytes and self._leaving is not None:
            self._leaving.set_result(None)
            self._leaving = None


# Events. They never refer to the function, whose object may hold references or arrays.


def call_ended(call: Pending, *, failed: bool) -> None:
    """Report a call on its caller, from its sending to its answer."""
    if events.sink is not None:
        now = time.monotonic()
        events.pass_on((_event, call.id, facts_of(call.function), call.caller, call.peer, call.since, now, failed))


def call_served(identifier: int | None, function: Any, worker: WorkerInfo, since: float, *, failed: bool) -> None:
    """Report a call on its callee, from its arrival to the sending of the answer; without an id a part of one."""
    if events.sink is not None:
        events.pass_on((_event, identifier, facts_of(function), worker, None, since, time.monotonic(), failed))


task_served = functools.partial(call_served, None)


def facts_of(function: Any) -> tuple[str, str, int | None]:
    """Return what an event says of a function: the event's kind, the function's name, and its id in a context."""
    if isinstance(function, ServedFunction):
        return function.served_as, function.label, function.recorded_as
    return events.SERVE, describe(function), None


def _event(*facts: Any) -> Event:
    identifier, (kind, name, message), worker, to, since, end, failed = facts
    details: dict[str, Any] = {} if identifier is None else {"call": spell(identifier)}
    if to is not None:
        kind, details["to"] = events.CALL, to.name
    if message is not None:  # the id under which a context knows the call's recording or pullback
        details["message"] = spell(message)
    if failed:
        details["failed"] = True
    return Event(kind, worker.rank, worker.name, name, since, end, details)
