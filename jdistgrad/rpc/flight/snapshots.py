"""Snapshots: what a worker waits for and serves now, as numbers, strings and containers of them.

They are taken while other threads run or hang. So nothing here takes a lock that such a thread may hold: the tables
are copied in one step of the interpreter.
"""

import threading
import traceback
from types import FrameType
from typing import Any

from jdistgrad.events import Event
from jdistgrad.rpc import places
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.members.watchdog import MeetingByCalls, Participation
from jdistgrad.rpc.serving.being_served import name_of
from jdistgrad.rpc.serving.server import Served
from jdistgrad.rpc.worker import Worker
from jdistgrad.threads import frames
from jdistgrad.wire.ids import spell

DEEPEST = 60  # frames of a thread


def of_worker(worker: Worker, now: float) -> dict[str, Any]:
    """Describe what a worker waits for and serves."""
    served, meetings = worker.server.being_served.now(), worker.watchdog.by_calls()
    calls = [call for call in worker.calls.pending() if not is_part_of(meetings.get(call.thread), call)]
    return {
        "rank": worker.rank,
        "world": worker.world,
        "names": [one.name for one in worker.directory.workers],
        "home": worker.home,
        "failure": None if worker.failure is None else str(worker.failure),
        "contexts": [spell(scope) for scope in worker.scopes.identifiers()],
        "calls": [of_call(call, served, now) for call in calls],
        "serving": [of_served(one, now) for one in served],
        "collectives": [
            *(of_collective(one, now) for one in worker.watchdog.engaged()),
            *(of_meeting(one, now) for one in meetings.values()),
        ],
        "refused": {str(source): count for source, count in worker.refused.copy().items()},
        "shutdown": worker.closing.waited(now),
    }


def of_call(call: Pending, served: list[Any], now: float) -> dict[str, Any]:
    """Describe a call that is not answered, with the call that is being served on the thread that made it."""
    within = [one for one in served if one.thread == call.thread and one.since <= call.since]
    return {
        "id": spell(call.id),
        "to": call.peer.rank,
        "function": describe(call.function),
        "seconds": now - call.since,
        "context": None if call.context is None else spell(call.context),
        "serving": spell(within[-1].message.id) if within else None,
    }


def of_served(one: Served, now: float) -> dict[str, Any]:
    return {
        "id": spell(one.message.id),
        "caller": one.message.source,
        "function": name_of(one),
        "seconds": now - one.since,
        "context": None if one.context is None else spell(one.context),
        "thread": one.thread,
    }


def of_collective(one: Participation, now: float) -> dict[str, Any]:
    return {
        "what": one.entry.what,
        "group": repr(one.entry.group),
        "turn": one.entry.turn,
        "peers": sorted(one.peers),
        "seconds": now - one.since,
        "inside_mpi": one.blocking,
        "spares_shutdown": False,
    }


def is_part_of(meeting: MeetingByCalls | None, call: Pending) -> bool:
    return meeting is not None and call.since >= meeting.since


def of_meeting(one: MeetingByCalls, now: float) -> dict[str, Any]:
    """Describe a meeting by calls like a collective. It has no number: its name tells it from others."""
    return {
        "what": one.what,
        "group": "by calls",
        "turn": one.what,
        "peers": sorted(one.peers),
        "seconds": now - one.since,
        "inside_mpi": False,
        "spares_shutdown": one.spares_shutdown,
    }


def of_threads() -> list[dict[str, Any]]:
    """Describe the threads of this process: name, line of the user's program, and stack, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [of_thread(ident, names.get(ident, ""), frame) for ident, frame in frames().items()]


def of_thread(ident: int, name: str, frame: FrameType) -> dict[str, Any]:
    mine = places.in_program(frame)
    stack = [
        [one.f_code.co_filename, line, one.f_code.co_qualname]
        for one, line in list(traceback.walk_stack(frame))[:DEEPEST]
    ]
    return {"id": ident, "name": name, "place": None if mine is None else places.place_of(mine), "stack": stack}


def of_event(event: Event, now: float) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "worker": event.worker,
        "rank": event.rank,
        "name": event.name,
        "ago": now - event.end,
        "seconds": event.end - event.start,
        "details": {name: str(value) for name, value in event.details.items()},
    }
