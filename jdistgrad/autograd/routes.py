"""What one message asks of a worker: stops in turn, of which a later one may need what an earlier one makes.

A route says everything that is the same each time a step runs. It is decoded once by those who get it often.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jdistgrad import events
from jdistgrad.autograd.compiling import Map
from jdistgrad.autograd.filled import Filled, made
from jdistgrad.autograd.layout import Layout, is_array, split
from jdistgrad.autograd.order import Place
from jdistgrad.autograd.recording import Lane, Pulled, Recorded
from jdistgrad.autograd.results import changed_structure
from jdistgrad.rpc.current import current_worker
from jdistgrad.rpc.frozen import Frozen
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.references import delivered
from jdistgrad.rpc.telling import task_served


@dataclasses.dataclass(frozen=True)
class Made:
    """What an earlier stop makes: its turn, and the number of the array."""

    turn: int
    number: int


Source = int | Made | Filled  # a number: of what the message brings


@dataclasses.dataclass(eq=False)
class CallStop:
    """Call a function; ``wanted``: record it, to be pulled back to these leaves of its arguments."""

    function: Any
    arguments: Layout
    wanted: tuple[int, ...] | None
    lanes: tuple[Lane, ...]
    count: int  # arrays it returns
    served_as = events.SERVE

    def task(self, numbers: Sequence[int], place: Place) -> Any:
        if self.wanted is None:
            return self.function
        return Recorded(self.function, numbers[0], self.wanted, place, self.lanes)

    def run(self, task: Any, items: list[Any]) -> list[Any]:
        args, kwargs = self.arguments.fill(made(items))
        if self.wanted is None:
            args, kwargs = delivered(args, kwargs)
        result = task(*args, **kwargs)
        if isinstance(result, concurrent.futures.Future):
            result = result.result()
        _, arrays = split(result, is_array)
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return arrays


@dataclasses.dataclass(eq=False)
class PullStop:
    """Pull the pullback of something recorded."""

    what: str
    wanted: tuple[int, ...]
    live: tuple[int, ...]
    last: bool
    maps: tuple[Map, ...]
    served_as = events.PULLBACK

    def task(self, numbers: Sequence[int], place: Place) -> Pulled:
        message, number = numbers
        return Pulled(self.what, message, number, self.wanted, self.live, self.last, self.maps, place)

    def run(self, task: Pulled, items: list[Any]) -> list[Any]:
        return task(items)


@dataclasses.dataclass(eq=False)
class Route:
    """Stops, where the items of each come from, and which arrays go back."""

    stops: list[CallStop | PullStop]
    sources: list[list[Source]]
    wanted: list[Made]


class Visit:
    """One run of a route. ``numbers``: of messages and contributions, for each stop; ``items``: what it brings."""

    takes_references = True

    def __init__(self, route: Frozen[Route], numbers: list[tuple[int, ...]], place: Place, items: list[Any]):
        self._route, self._numbers, self._place, self._items = route, numbers, place, items
        self._running: Any = None

    def __reduce__(self) -> Any:
        return Visit, (self._route, self._numbers, self._place, self._items)

    @property
    def label(self) -> str:
        """What runs now; else all of it."""
        if self._running is not None:
            return describe(self._running)
        names = [describe(stop.task(numbers, ())) for stop, numbers in zip(self._stops, self._numbers, strict=True)]
        return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

    @property
    def served_as(self) -> str:
        return self._stops[0].served_as if len(self._stops) == 1 else events.SERVE

    @property
    def message(self) -> int | None:
        """The id by which its context knows it, if it is one thing."""
        return self._numbers[0][0] if len(self._numbers) == 1 and self._numbers[0] else None

    @property
    def _stops(self) -> list[CallStop | PullStop]:
        return self._route.value.stops

    def __call__(self) -> list[Any]:
        route, before = self._route.value, list[list[Any]]()
        for turn, (stop, sources) in enumerate(zip(route.stops, route.sources, strict=True)):
            since = time.monotonic()
            self._running = task = stop.task(self._numbers[turn], (*self._place, turn))
            before.append(stop.run(task, [self._item(source, before) for source in sources]))
            if len(route.stops) > 1:
                task_served(task, current_worker().info, since)
        self._running = None
        return [before[one.turn][one.number] for one in route.wanted]

    def _item(self, source: Source, before: list[list[Any]]) -> Any:
        if isinstance(source, int):
            return self._items[source]
        return before[source.turn][source.number] if isinstance(source, Made) else source
