"""What one message asks of a worker: stops in turn, of which a later one may need what an earlier one makes.

A route says everything that is the same each time a step runs. It is decoded once by those who get it often.
"""

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
from jdistgrad.autograd.results import as_jax, changed_structure
from jdistgrad.rpc.current import current_worker
from jdistgrad.rpc.delivery import delivered
from jdistgrad.rpc.frozen import Frozen
from jdistgrad.rpc.functions import describe
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

    arguments: Layout
    wanted: tuple[int, ...] | None
    lanes: tuple[Lane, ...]
    count: int  # arrays it returns
    served_as = events.SERVE

    def task(self, function: Any, numbers: Sequence[int], place: Place) -> Any:
        return function if self.wanted is None else Recorded(function, numbers[0], self.wanted, place, self.lanes)

    def run(self, task: Any, items: list[Any]) -> list[Any]:
        args, kwargs = self.arguments.fill(made(items))
        if self.wanted is None:
            args, kwargs = delivered(args, kwargs)
        _, arrays = split(task(*args, **kwargs), is_array)
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return as_jax(arrays)


@dataclasses.dataclass(eq=False)
class PullStop:
    """Pull the pullback of something recorded."""

    what: str
    wanted: tuple[int, ...]
    live: tuple[int, ...]
    last: bool
    maps: tuple[Map, ...]
    served_as = events.PULLBACK

    def task(self, function: None, numbers: Sequence[int], place: Place) -> Pulled:
        message, number = numbers
        return Pulled(self.what, message, number, self.wanted, self.live, self.last, self.maps, place)

    def run(self, task: Pulled, items: list[Any]) -> list[Any]:
        return task(items)


@dataclasses.dataclass(eq=False)
class Route:
    """Stops, where the items of each come from, and which arrays go back: all that is the same each time.

    ``needed``: what later stops or the caller get; ``forgotten``: for each stop, what nobody needs after it.
    """

    stops: list[CallStop | PullStop]
    sources: list[list[Source]]
    wanted: list[Made]
    needed: frozenset[Made]
    forgotten: list[list[int | Made]]

    @classmethod
    def of(cls, stops: list[CallStop | PullStop], sources: list[list[Source]], wanted: list[Made]) -> "Route":
        last = {one: turn for turn, used in enumerate(sources) for one in used if not isinstance(one, Filled)}
        forgotten: list[list[int | Made]] = [[] for _ in stops]
        for one, turn in last.items():
            if one not in wanted:
                forgotten[turn].append(one)
        needed = frozenset(one for one in (*last, *wanted) if isinstance(one, Made))
        return cls(stops, sources, wanted, needed, forgotten)


class Visit:
    """One run of a route. ``functions`` and ``numbers`` (of messages and contributions): for each stop; ``items``: what
    it brings."""

    takes_references = True

    def __init__(
        self,
        route: Frozen[Route],
        functions: list[Any],
        numbers: list[tuple[int, ...]],
        place: Place,
        items: list[Any],
    ):
        self._route, self._functions, self._numbers = route, functions, numbers
        self._place, self._items = place, items
        self._running: int | None = None

    def __reduce__(self) -> Any:
        return Visit, (self._route, self._functions, self._numbers, self._place, self._items)

    @property
    def label(self) -> str:
        """What runs now; else all of it."""
        running = self._running
        if running is not None:
            return describe(self._task(running))
        names = [describe(self._task(turn)) for turn in range(len(self._functions))]
        return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")

    @property
    def served_as(self) -> str:
        return self._route.value.stops[0].served_as if len(self._functions) == 1 else events.SERVE

    @property
    def message(self) -> int | None:
        """The id by which its context knows it, if it is one thing."""
        return self._numbers[0][0] if len(self._numbers) == 1 and self._numbers[0] else None

    def __call__(self) -> list[Any]:
        route, before = self._route.value, dict[Made, Any]()
        for turn in range(len(route.stops)):
            self._running = turn
            for number, array in enumerate(self._stop(turn, before)):
                if Made(turn, number) in route.needed:
                    before[Made(turn, number)] = array
            for one in route.forgotten[turn]:
                if isinstance(one, Made):
                    del before[one]
                else:
                    self._items[one] = None
        self._running = None
        return [before[one] for one in route.wanted]

    def _stop(self, turn: int, before: dict[Made, Any]) -> list[Any]:
        task, since, failed = self._task(turn), time.monotonic(), True
        try:
            items = [self._item(source, before) for source in self._route.value.sources[turn]]
            arrays = self._route.value.stops[turn].run(task, items)
            failed = False
            return arrays
        finally:
            if len(self._functions) > 1:
                task_served(task, current_worker().info, since, failed=failed)

    def _task(self, turn: int) -> Any:
        return self._route.value.stops[turn].task(self._functions[turn], self._numbers[turn], (*self._place, turn))

    def _item(self, source: Source, before: dict[Made, Any]) -> Any:
        if isinstance(source, int):
            return self._items[source]
        return before[source] if isinstance(source, Made) else source
