"""Recording on the callee: run a function, keep its pullback in the tape, and pull it when the cotangents come."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistgrad import events
from jdistgrad.autograd.callee.functions import Publishing, gradient_layout
from jdistgrad.autograd.callee.orders import Orders, named_among
from jdistgrad.autograd.callee.pullbacks import Differentiated, Map, differentiate
from jdistgrad.autograd.callee.state import state_argument
from jdistgrad.autograd.tape.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Target, mark, total
from jdistgrad.autograd.tape.links import Place, next_place, serving
from jdistgrad.autograd.tape.tape import Tape, current_tape, note_fetched
from jdistgrad.autograd.values.holes import Layout, split
from jdistgrad.autograd.values.results import as_jax
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.references.handles import NO_MARKS
from jdistgrad.rpc.references.rref import ByReference, RRef


@dataclasses.dataclass(frozen=True)
class Lane:
    """A batch dimension that a leaf gets at the callee: each element has the same value, but a cotangent of its own."""

    leaf: int
    axis: int
    size: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.size, *shape[self.axis :])

    def insert(self, array: Any) -> Any:
        return jnp.broadcast_to(jnp.expand_dims(array, self.axis), self.shape(array.shape))


@dataclasses.dataclass(frozen=True)
class RecordCall(ServedFunction):
    """A function that keeps its pullbacks in the tape. The orders name leaves of its arguments by number.

    It takes references as such: gradients of their values go to their owners.
    """

    function: Any
    message: int
    orders: Orders
    place: Place
    lanes: tuple[Lane, ...] = ()  # added to wanted leaves in this order
    takes_references = True

    @property
    def label(self) -> str:
        return describe(self.function)

    @property
    def recorded_as(self) -> int:
        return self.message

    def failed(self, error: BaseException) -> None:
        if isinstance(self.function, ServedFunction):
            self.function.failed(error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            recording = Recording(self.function, Arguments(args, kwargs, self.orders, self.lanes))
            if recording.state is not None:
                tape.started_from(self.message, recording.state)
            tape.recordings.keep(self.message, recording)
            if not isinstance(self.function, Publishing):
                tape.links.add_answer(self.message, self.label)
            return recording.result


class Arguments:
    """Arguments with references replaced by their values; the arrays of leaves that some order names are operands.

    ``wanted``: for each leaf of each order, its reference (None for an array), and the number of its operands.
    """

    def __init__(self, args: Any, kwargs: Any, orders: Orders, lanes: tuple[Lane, ...]):
        leaves, self._orders = list(trees.leaves((args, kwargs))), orders
        self.operands: list[Any] = []
        self._leaf_of: list[int] = []  # the leaf of each operand
        values, named = self._fetch(leaves), {leaf for order in orders for leaf in order}
        self._references = sum(isinstance(leaf, ByReference) for leaf in leaves)
        holed, noted = [], set[RRef[Any]]()
        for number, leaf in enumerate(leaves):
            item = values[leaf] if isinstance(leaf, RRef) else leaf.rref if isinstance(leaf, ByReference) else leaf
            holed.append(self._take(number, leaf, item, lanes) if number in named else item)
            if number in named and isinstance(leaf, RRef) and leaf not in noted:
                noted.add(leaf)
                note_fetched(leaf.id, leaf.owner.rank)
        self.wanted = [[self._wanted(leaves[number], number) for number in order] for order in orders]
        rest = iter(holed)
        self.layout = Layout(trees.map_leaves(lambda _: next(rest), (args, kwargs)), ())

    def _take(self, number: int, leaf: Any, item: Any, lanes: tuple[Lane, ...]) -> Any:
        """Make operands of a leaf's value and add its lanes to them; return the tree with holes in their places."""
        is_value = isinstance(leaf, RRef)
        layout, operands = gradient_layout(item) if is_value else split(item, lambda _: True)
        self._references += is_value and layout.has_references
        for lane in lanes:
            operands = [lane.insert(one) for one in operands] if lane.leaf == number else operands
        self.operands += operands
        self._leaf_of += [number] * len(operands)
        return layout.tree

    def _wanted(self, leaf: Any, number: int) -> tuple[RRef[Any] | None, int]:
        return leaf if isinstance(leaf, RRef) else None, self._leaf_of.count(number)

    def differentiate(self, function: Any) -> Differentiated:
        orders = named_among(self._leaf_of, self._orders)
        references = self._references > (state_argument(function) is not None)
        return differentiate(function, self.layout, self.operands, orders, references=references)

    def _fetch(self, leaves: list[Any]) -> dict[RRef[Any], Any]:
        references = {leaf: leaf.value_future(math.inf) for leaf in leaves if isinstance(leaf, RRef)}
        return {reference: future.result() for reference, future in references.items()}


class Recording:
    """A recorded call: its result, and everything its pullbacks need."""

    def __init__(self, function: Any, arguments: Arguments):
        self._wanted = arguments.wanted
        self._published = function.id if isinstance(function, Publishing) else None
        inner = function.function if isinstance(function, Publishing) else function
        if self._published is None:
            self._derived = arguments.differentiate(inner)
            self.result = self._derived.result
        else:
            owned, self._derived = function.owned(), arguments.differentiate(inner)
            owned.value.set_result(self._derived.result)
            self._derived.result, self.result = None, NO_MARKS
        self.state = self._derived.state

    def pull(self, tape: Tape, pulled: "PullCall", cotangents: list[Any]) -> list[Any]:
        """Return the cotangents of the order's leaves, given those of the live results.

        If the result was published, ``cotangents`` holds its handle's, and the gradient is taken from the ledger.
        """
        if self._published is None:
            return self._pull(pulled, pulled.live, cotangents, pulled.maps)
        marks = np.asarray(cotangents[0])
        lanes = marks.shape[: marks.ndim - NO_MARKS.ndim]
        first = marks.reshape(-1, *NO_MARKS.shape)[0].tolist()
        taken = tape.ledger.take(Target(REFERENCE, self._published), first, lanes).result()
        sums = as_jax(total(taken, lanes))
        live = tuple(k for k, one in enumerate(sums) if one is not None)
        maps = tuple(dataclasses.replace(one, flags=(True,) * len(live)) for one in pulled.maps)
        return self._pull(pulled, live, [sums[k] for k in live], maps)

    def cotangents(self, order: int, live: tuple[int, ...], cotangents: list[Any], maps: tuple[Map, ...]) -> list[Any]:
        """Return the cotangents of an order's leaves, none of which may be a reference."""
        return self._derived.pull(order, live, cotangents, maps)

    def push(self, pushed: "PushCall", tangents: list[Any]) -> list[Any]:
        """Return the tangents of the results, given those of the order's leaves, which are arrays."""
        return self._derived.push(pushed.order, tangents, pushed.maps)

    def _pull(
        self, pulled: "PullCall", live: tuple[int, ...], cotangents: list[Any], maps: tuple[Map, ...]
    ) -> list[Any]:
        flat = iter(self._derived.pull(pulled.order, live, cotangents, maps))
        lanes = tuple(one.size for one in reversed(maps))
        gradients: dict[RRef[Any], list[Any]] = {}
        wanted = [(reference, list(itertools.islice(flat, count))) for reference, count in self._wanted[pulled.order]]
        marks = np.full((*lanes, *NO_MARKS.shape), mark(pulled.number), NO_MARKS.dtype)
        found = [self._found(reference, part, marks, gradients) for reference, part in wanted]
        for reference, leaves in gradients.items():
            contribution = Contribution(pulled.number, lanes, leaves, next_place())
            contribute(reference.owner.rank, REFERENCE, reference.id, contribution)
        return found

    def _found(
        self,
        reference: RRef[Any] | None,
        part: list[Any],
        marks: np.ndarray,
        gradients: dict[RRef[Any], list[Any]],
    ) -> Any:
        """Return the cotangent of an array, or for a reference the marks of a contribution, whose leaves are gathered.

        The leaves go to the owner, and the marks back to the caller. A reference that was passed twice makes one
        contribution.
        """
        if reference is None:
            return part[0]
        before = gradients.get(reference)
        if before is None:
            gradients[reference] = part
            return marks
        gradients[reference] = [a + b for a, b in zip(before, part, strict=True)]
        return np.zeros_like(marks)


@dataclasses.dataclass(frozen=True)
class PullCall(ServedFunction):
    """A function that pulls a recorded call's pullback. Its argument: the cotangents of the live results."""

    what: str
    message: int
    number: int  # the id of the contributions it makes
    order: int
    live: tuple[int, ...]
    last: bool
    maps: tuple[Map, ...]
    place: Place

    @property
    def label(self) -> str:
        return f"the pullback of {self.what}"

    @property
    def served_as(self) -> str:
        return events.PULLBACK

    @property
    def recorded_as(self) -> int:
        return self.message

    def __call__(self, cotangents: list[Any]) -> list[Any]:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            recording = tape.recordings.find(self.message, last=self.last)
            if self.last:
                tape.forget_state(self.message)
            return recording.pull(tape, self, cotangents)


@dataclasses.dataclass(frozen=True)
class PushCall(ServedFunction):
    """A function that pushes tangents through a recorded call. Its argument: the tangents of the order's leaves."""

    what: str
    message: int
    order: int
    maps: tuple[Map, ...]
    place: Place

    @property
    def label(self) -> str:
        return f"the tangents of {self.what}"

    @property
    def recorded_as(self) -> int:
        return self.message

    def __call__(self, tangents: list[Any]) -> list[Any]:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            return tape.recordings.find(self.message, last=False).push(self, tangents)
