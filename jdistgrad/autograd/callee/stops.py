"""The stops of calls: a function is called, recorded or not, and its recording is pulled or pushed through."""

import dataclasses
from typing import Any, ClassVar

from jdistgrad import events
from jdistgrad.autograd.callee.bundle import Stop
from jdistgrad.autograd.callee.functions import Publishing
from jdistgrad.autograd.callee.orders import Orders
from jdistgrad.autograd.callee.pullbacks import Map
from jdistgrad.autograd.callee.recording import Lane, Recording
from jdistgrad.autograd.tape.tape import answer, current_tape, next_message, serving
from jdistgrad.autograd.values.holes import Layout, as_jax, changed_structure, is_array, made, split
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.futures import answer_of
from jdistgrad.rpc.server import delivered


@dataclasses.dataclass(frozen=True)
class CallStop(Stop):
    """A call of a function. ``orders``: the leaves of its arguments to record pullbacks for; if empty, none.

    ``arguments``: the arguments with holes for the items; None if the items are the arguments, and keyword arguments
    if there are some. A recorded function takes references as such: gradients of their values go to their owners.
    """

    arguments: Layout | None = None
    orders: Orders = ()
    lanes: tuple[Lane, ...] = ()  # added to wanted leaves in this order
    count: int | None = None  # the number of arrays the function returns; None if its result goes back as it is
    references: bool = False  # whether there may be references among its arguments

    @property
    def label(self) -> str:
        return describe(self.function)

    @property
    def records(self) -> bool:
        return bool(self.orders)

    @property
    def is_closed(self) -> bool:
        return not self.references

    def __call__(self, items: list[Any]) -> Any:
        if self.orders:
            result = self._recorded(items)
        else:
            args, kwargs = delivered(*self._filled(items))
            result = self.function(*args, **kwargs)
        return result if self.count is None else self.arrays(answer_of(result))

    def _recorded(self, items: list[Any]) -> Any:
        message = self.numbers[0]
        with serving(message, self.place):
            tape = current_tape(lambda: self.label)
            recording = self.recording(items)
            tape.record(message, recording)
            if not isinstance(self.function, Publishing):
                tape.links.append(answer(next_message(), message, self.label))
            return recording.result

    def recording(self, items: list[Any]) -> Recording:
        return Recording(self.function, *self._filled(items), self.orders, self.lanes)

    def _filled(self, items: list[Any]) -> tuple[Any, Any]:
        if self.arguments is not None:
            return self.arguments.fill(made(items))
        args, kwargs = (*items, {})[:2]
        return args, kwargs

    def traced(self, turn: int, items: list[Any], recordings: dict[int | None, Any]) -> list[Any]:
        if not self.orders:
            found: list[Any] = self(items)
            return found
        recordings[turn] = self.recording(items)
        return self.arrays(recordings[turn].result)

    def arrays(self, result: Any) -> list[Any]:
        _, arrays = split(result, is_array)
        if self.count is not None and len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return as_jax(arrays)


@dataclasses.dataclass(frozen=True)
class LinearStop(Stop):
    """A linear function that a recorded call holds: the pull of cotangents, or the push of tangents, its items."""

    what: str
    order: int  # the number of the derivative
    live: tuple[int, ...] | None  # the results whose cotangents are pulled; None: it pushes tangents
    maps: tuple[Map, ...]
    last: bool = False

    @property
    def label(self) -> str:
        return f"the {'tangents' if self.live is None else 'pullback'} of {self.what}"

    follows: ClassVar[bool] = True

    @property
    def served_as(self) -> str:
        return events.SERVE if self.live is None else events.PULLBACK

    @property
    def is_closed(self) -> bool:
        return self.last

    def traced(self, turn: int, items: list[Any], recordings: dict[int | None, Any]) -> list[Any]:
        found: list[Any] = recordings.pop(self.call).derived.linear(self.order, self.live, items, self.maps)
        return found

    def __call__(self, items: list[Any]) -> list[Any]:
        message, *rest = self.numbers
        with serving(message, self.place):
            recording: Recording = current_tape(lambda: self.label).find(message, last=self.last)
            if self.live is None:
                return recording.derived.linear(self.order, None, items, self.maps)
            return recording.pull(self.order, self.live, items, self.maps, *rest)
