"""Events of calls: sent, answered, served.

What goes to the listeners is put together only when they want to see it. It never refers to the function, whose object
may hold references or arrays.
"""

import time
import types
from typing import Any

from jdistgrad import events
from jdistgrad.events import Event
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import ServedFunction, describe, described
from jdistgrad.wire.ids import spell

Name = str | tuple[str, str]  # or module and qualified name
Ending = dict[str, bool]
Facts = tuple[str, Name, int | None]  # of a function: kind of event when it is served, name, id in a context


def call_ended(call: Pending, *, failed: bool) -> None:
    """Report a call on its caller, from its sending to its answer."""
    if events.sink is not None:
        told = (
            _call,
            call.id,
            facts_of(call.function),
            call.caller,
            call.peer,
            call.since,
            time.monotonic(),
            ending_of(failed=failed),
        )
        events.pass_on(told)


def call_served(identifier: int, function: Any, worker: WorkerInfo, since: float, *, failed: bool) -> None:
    """Report a call on its callee, from its arrival to the sending of the answer."""
    if events.sink is not None:
        events.pass_on(
            (_served, identifier, facts_of(function), worker, since, time.monotonic(), ending_of(failed=failed))
        )


def task_served(function: Any, worker: WorkerInfo, since: float, *, failed: bool) -> None:
    """Report one of several functions that were called together."""
    if events.sink is not None:
        events.pass_on((_served, None, facts_of(function), worker, since, time.monotonic(), ending_of(failed=failed)))


def facts_of(function: Any) -> Facts:
    """Return what an event says of a function. A plain function's name, of most calls, is put together later."""
    if type(function) is types.FunctionType:
        return events.SERVE, (function.__module__, function.__qualname__), None
    if isinstance(function, ServedFunction):
        return function.served_as, function.label, function.recorded_as
    return events.SERVE, describe(function), None


def _call(
    identifier: int, facts: Facts, caller: WorkerInfo, peer: WorkerInfo, since: float, end: float, ending: Ending
) -> Event:
    details = {"call": spell(identifier), "to": peer.name, **_message(facts), **ending}
    return Event(events.CALL, caller.rank, caller.name, _name(facts), since, end, details)


def _served(
    identifier: int | None, facts: Facts, worker: WorkerInfo, since: float, end: float, ending: Ending
) -> Event:
    call = {} if identifier is None else {"call": spell(identifier)}
    return Event(facts[0], worker.rank, worker.name, _name(facts), since, end, {**call, **_message(facts), **ending})


def _name(facts: Facts) -> str:
    name = facts[1]
    return name if isinstance(name, str) else described(*name)


def _message(facts: Facts) -> dict[str, str]:
    """Return the id under which a context knows the call's recording or pullback, if it has one, as an event detail."""
    return {} if facts[2] is None else {"message": spell(facts[2])}


def ending_of(*, failed: bool) -> Ending:
    return {"failed": True} if failed else {}
