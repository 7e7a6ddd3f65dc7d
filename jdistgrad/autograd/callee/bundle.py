"""Bundles: the stops of one message, in turn. A stop may need arrays that an earlier stop makes.

A bundle holds everything about its stops that is the same in every run of a step. Workers decode it once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jdistgrad import events
from jdistgrad.autograd.callee.orders import Orders
from jdistgrad.autograd.callee.recording import Lane, LinearCall
from jdistgrad.autograd.values.holes import Layout, is_array, split
from jdistgrad.autograd.values.results import Uniform, as_jax, changed_structure, made
from jdistgrad.rpc.futures import answer_of
from jdistgrad.rpc.serving.server import delivered


@dataclasses.dataclass(frozen=True)
class StopOutput:
    """An array that an earlier stop makes: the turn of the stop, and the number of the array."""

    turn: int
    number: int


Source = int | StopOutput | Uniform  # an int is the number of an array that the message brings


@dataclasses.dataclass(eq=False)
class CallStop:
    """A stop that calls a function. ``orders``: the leaves of its arguments to record pullbacks for; if empty, none."""

    arguments: Layout
    orders: Orders
    lanes: tuple[Lane, ...]
    count: int  # the number of arrays the function returns
    references: bool = False  # whether there may be references among its arguments
    served_as = events.SERVE

    def run(self, task: Any, items: list[Any]) -> list[Any]:
        args, kwargs = self.arguments.fill(made(items))
        if not self.orders:
            args, kwargs = delivered(args, kwargs)
        return self.arrays(answer_of(task(*args, **kwargs)))

    def arrays(self, result: Any) -> list[Any]:
        """Return the arrays of a result. Raises DifferentiationError if their number is not ``count``."""
        _, arrays = split(result, is_array)
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return as_jax(arrays)


@dataclasses.dataclass(eq=False)
class Bundle:
    """Stops, the sources of the items of each, and the arrays that go back.

    ``needed``: arrays for later stops or the caller. ``forgotten``: for each stop, the arrays of which it is the last
    user. ``compiled_forms``: the compiled forms made so far, by functions.
    """

    stops: list[CallStop | LinearCall]
    sources: list[list[Source]]
    wanted: list[StopOutput]
    needed: frozenset[StopOutput]
    forgotten: list[list[int | StopOutput]]
    compiled_forms: Any = None

    def __reduce__(self) -> Any:
        return Bundle.of, (self.stops, self.sources, self.wanted)

    @classmethod
    def of(cls, stops: list[CallStop | LinearCall], sources: list[list[Source]], wanted: list[StopOutput]) -> "Bundle":
        last = {one: turn for turn, used in enumerate(sources) for one in used if not isinstance(one, Uniform)}
        forgotten: list[list[int | StopOutput]] = [[] for _ in stops]
        for one, turn in last.items():
            if one not in wanted:
                forgotten[turn].append(one)
        needed = frozenset(one for one in (*last, *wanted) if isinstance(one, StopOutput))
        return cls(stops, sources, wanted, needed, forgotten)

    @functools.cached_property
    def is_closed(self) -> bool:
        """Return whether only arrays come and go and no recording is left: the bundle pulls everything it records."""
        recorded = {turn for turn, one in enumerate(self.stops) if isinstance(one, CallStop) and one.orders}
        pulls = [one for one in self.stops if isinstance(one, LinearCall)]
        return (
            {one.call for one in pulls} == recorded
            and all(one.last for one in pulls)
            and not any(one.references for one in self.stops if isinstance(one, CallStop))
        )

    def walk(self, items: list[Any], run: Callable[[int, list[Any]], list[Any]]) -> list[Any]:
        """Return the wanted arrays. ``run`` makes the arrays of a stop. Arrays are dropped after their last use."""
        before = dict[StopOutput, Any]()

        def found(source: Source) -> Any:
            if isinstance(source, int):
                return items[source]
            return before[source] if isinstance(source, StopOutput) else source

        for turn, sources in enumerate(self.sources):
            for number, array in enumerate(run(turn, [found(source) for source in sources])):
                if StopOutput(turn, number) in self.needed:
                    before[StopOutput(turn, number)] = array
            for one in self.forgotten[turn]:
                if isinstance(one, StopOutput):
                    del before[one]
                else:
                    items[one] = None
        return [before[one] for one in self.wanted]
