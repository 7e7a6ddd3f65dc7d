"""Timeline events of all layers: calls, their serving, pullbacks, compiled pieces, buckets.

Without a recorder an event costs one comparison: ``if events.sink is not None: events.tell(...)``.
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


sink: Callable[[Event], None] | None = None


def tell(kind: str, rank: int, worker: str, name: str, start: float, arrays: Any = None, **details: Any) -> None:
    """Report an event that ends now."""
    pass_on(Event(kind, rank, worker, name, start, time.monotonic(), details, arrays))


def pass_on(event: Event) -> None:
    listener = sink  # another thread may set it to None after the check
    if listener is not None:
        listener(event)
