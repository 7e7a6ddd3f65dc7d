"""Timeline events of calls: sent, answered, served."""

from typing import Any

from jdistgrad import events
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.wire.ids import spell


def call_ended(call: Pending, *, failed: bool) -> None:
    """Report a call on its caller, from its sending to its answer."""
    if events.sink is not None:
        details = {"call": spell(call.id), "to": call.peer.name, **message_of(call.function), **ending(failed=failed)}
        worker = call.caller
        events.tell(events.CALL, worker.rank, worker.name, describe(call.function), call.since, **details)


def call_served(identifier: int, function: Any, worker: WorkerInfo, since: float, *, failed: bool) -> None:
    """Report a call on its callee, from its arrival to the sending of the answer."""
    if events.sink is not None:
        details = {"call": spell(identifier), **message_of(function), **ending(failed=failed)}
        events.tell(kind_of(function), worker.rank, worker.name, describe(function), since, **details)


def task_served(function: Any, worker: WorkerInfo, since: float, *, failed: bool) -> None:
    """Report one of several functions that were called together."""
    if events.sink is not None:
        details = {**message_of(function), **ending(failed=failed)}
        events.tell(kind_of(function), worker.rank, worker.name, describe(function), since, **details)


def kind_of(function: Any) -> str:
    return function.served_as if isinstance(function, ServedFunction) else events.SERVE


def message_of(function: Any) -> dict[str, str]:
    """Return the id under which a context knows the call's recording or pullback, if it has one, as an event detail."""
    message = function.recorded_as if isinstance(function, ServedFunction) else None
    return {} if message is None else {"message": spell(message)}


def ending(*, failed: bool) -> dict[str, bool]:
    return {"failed": True} if failed else {}
