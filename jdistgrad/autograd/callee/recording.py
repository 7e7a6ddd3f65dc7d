"""Recording on the callee: run a function, keep its pullback in the tape, and pull it when the cotangents come."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistgrad import events
from jdistgrad.autograd.callee.functions import Publishing
from jdistgrad.autograd.callee.orders import Orders, named_among
from jdistgrad.autograd.callee.pullbacks import Differentiated, Map, differentiate
from jdistgrad.autograd.callee.state import state_argument
from jdistgrad.autograd.tape.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Target, mark, total
from jdistgrad.autograd.tape.links import Place, answer, next_message, next_place, serving
from jdistgrad.autograd.tape.tape import Tape, current_tape, note_fetched
from jdistgrad.autograd.values.holes import Layout, has_gradient, split
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
            tape.recordings.keep(self.message, recording)
            if not isinstance(self.function, Publishing):
                tape.links.note(answer(next_message(), self.message, self.label))
            return recording.result


class Arguments:
    """Arguments with references replaced by their values; the arrays of leaves that some order names are operands.

    ``wanted``: for each leaf of each order, its reference (None for an array), and the number of its operands.
    """

    def __init__(self, args: Any, kwargs: Any, orders: Orders, lanes: tuple[Lane, ...]):
        leaves, self._orders = list(trees.leaves((args, kwargs))), orders
        self.operands: list[Any] = []
        self._leaf_of: list[int] = []  # the leaf of each operand
        fetched = {leaf: leaf.value_future(math.inf) for leaf in leaves if isinstance(leaf, RRef)}
        values = {reference: future.result() for reference, future in fetched.items()}
        named = {leaf for order in orders for leaf in order}
        self._references = sum(isinstance(leaf, ByReference) for leaf in leaves)
        holed, noted = [], set[RRef[Any]]()
        for number, leaf in enumerate(leaves):
            item = values[leaf] if isinstance(leaf, RRef) else leaf.rref if isinstance(leaf, ByReference) else leaf
            holed.append(self._take(number, leaf, item, lanes) if number in named else item)
            if number in named and isinstance(leaf, RRef) and leaf not in noted:
                noted.add(leaf)
                note_fetched(leaf.id, leaf.owner.rank)
        self.wanted = [
            [(leaves[k] if isinstance(leaves[k], RRef) else None, self._leaf_of.count(k)) for k in order]
            for order in orders
        ]
        rest = iter(holed)
        self.layout = Layout(trees.map_leaves(lambda _: next(rest), (args, kwargs)), ())

    def _take(self, number: int, leaf: Any, item: Any, lanes: tuple[Lane, ...]) -> Any:
        """Make operands of a leaf's value and add its lanes to them; return the tree with holes in their places."""
        is_value = isinstance(leaf, RRef)
        layout, operands = split(item, has_gradient) if is_value else split(item, lambda _: True)
        self._references += is_value and layout.has_references
        for lane in (one for one in lanes if one.leaf == number):
            each = [(jnp.expand_dims(one, lane.axis), lane.shape(one.shape)) for one in operands]
            operands = [jnp.broadcast_to(*one) for one in each]
        self.operands += operands
        self._leaf_of += [number] * len(operands)
        return layout.tree

    def differentiate(self, function: Any) -> Differentiated:
        orders = named_among(self._leaf_of, self._orders)
        references = self._references > (state_argument(function) is not None)
        return differentiate(function, self.layout, self.operands, orders, references=references)


class Recording:
    """A recorded call: its result, and everything its pullbacks need."""

    def __init__(self, function: Any, arguments: Arguments):
        self._wanted = arguments.wanted
        self._published = function.id if isinstance(function, Publishing) else None
        inner = function.function if isinstance(function, Publishing) else function
        if self._published is None:
            self.derived = arguments.differentiate(inner)
            self.result = self.derived.result
        else:
            owned, self.derived = function.owned(), arguments.differentiate(inner)
            owned.value.set_result(self.derived.result)
            self.derived.result, self.result = None, NO_MARKS
        self.state = self.derived.state

    def pull(self, tape: Tape, pulled: "PullCall", cotangents: list[Any]) -> list[Any]:
        """Return the cotangents of the order's leaves, given those of the live results.

        If the result was published, ``cotangents`` holds its handle's, and the gradient is taken from the ledger.
        """
        live, maps = pulled.live, pulled.maps
        lanes = tuple(one.size for one in reversed(maps))
        if self._published is not None:
            marks = np.asarray(cotangents[0])
            given = marks.shape[: marks.ndim - NO_MARKS.ndim]
            first = marks.reshape(-1, *NO_MARKS.shape)[0].tolist()
            taken = tape.ledger.take(Target(REFERENCE, self._published), first, given).result()
            sums = as_jax(total(taken, given))
            live = tuple(k for k, one in enumerate(sums) if one is not None)
            maps = tuple(dataclasses.replace(one, flags=(True,) * len(live)) for one in maps)
            cotangents = [sums[k] for k in live]
        flat = iter(self.derived.pull(pulled.order, live, cotangents, maps))
        marks = np.full((*lanes, *NO_MARKS.shape), mark(pulled.number), NO_MARKS.dtype)
        # The gradients of references go to their owners, and the marks of these contributions back to the caller.
        found, gradients = list[Any](), dict[RRef[Any], list[Any]]()
        for wanted, count in self._wanted[pulled.order]:
            part = list(itertools.islice(flat, count))
            if wanted is None:
                found.append(part[0])
            elif wanted not in gradients:
                gradients[wanted] = part
                found.append(marks)
            else:  # it was passed twice, and makes one contribution
                gradients[wanted] = [a + b for a, b in zip(gradients[wanted], part, strict=True)]
                found.append(np.zeros_like(marks))
        for reference, leaves in gradients.items():
            contribution = Contribution(pulled.number, lanes, leaves, next_place())
            contribute(reference.owner.rank, REFERENCE, reference.id, contribution)
        return found


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

    served_as = events.PULLBACK

    @property
    def label(self) -> str:
        return f"the pullback of {self.what}"

    @property
    def recorded_as(self) -> int:
        return self.message

    def __call__(self, cotangents: list[Any]) -> list[Any]:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            return tape.recordings.find(self.message, last=self.last).pull(tape, self, cotangents)


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
            return tape.recordings.find(self.message, last=False).derived.push(self.order, tangents, self.maps)
