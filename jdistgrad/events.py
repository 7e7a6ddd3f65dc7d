"""Events of all layers: calls, their serving, pullbacks, compiled pieces, buckets. For the timeline and debugging.

Without a listener an event costs one comparison: ``if events.sink is not None: events.report(...)``. For calls, which
are many, the sink gets a function and its arguments, of which ``made`` makes the event.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CALL, SERVE, PULLBACK, PIECE, BUCKET = "call", "serve", "pullback", "piece", "bucket"


class Event(NamedTuple):
    """A period of work on a worker, from ``start`` to ``end`` by ``time.monotonic``.

    ``arrays``: the arrays that the work computes asynchronously; its real end is when they are ready.
    """

    kind: str
    rank: int
    worker: str
    name: str
    start: float
    end: float
    details: Mapping[str, Any]
    arrays: Any = None


Report = Event | tuple[Any, ...]  # an event; or the function that makes it, and its arguments
Listener = Callable[[Report], None]

sink: Listener | None = None  # a listener sets it, as long as it listens: one at a time


def report(kind: str, rank: int, worker: str, name: str, start: float, arrays: Any = None, **details: Any) -> None:
    """Report an event that ends now."""
    pass_on(Event(kind, rank, worker, name, start, time.monotonic(), details, arrays))


def pass_on(event: Report) -> None:
    listener = sink  # another thread may set it to None after the check
    if listener is not None:
        listener(event)


def made(event: Report) -> Event:
    """Return the event that a listener got."""
    if isinstance(event, Event):
        return event
    make, *facts = event
    found: Event = make(*facts)
    return found
