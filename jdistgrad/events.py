"""What happens, told to whoever records it: calls, what serving them takes, compiled pieces, buckets.

Every layer may tell. Where nobody records, that costs one comparison: ``if events.sink is not None: events.tell(...)``.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CALL, SERVE, PULLBACK, PIECE, BUCKET = "call", "serve", "pullback", "piece", "bucket"


class Event(NamedTuple):
    """Something that took time on a worker, from ``start`` to ``end`` by ``time.monotonic``.

    ``arrays``: it really ends when these are ready.
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
    """Tell of something that ends now."""
    pass_on(Event(kind, rank, worker, name, start, time.monotonic(), details, arrays))


def pass_on(event: Event) -> None:
    listener = sink  # it may go away meanwhile
    if listener is not None:
        listener(event)
