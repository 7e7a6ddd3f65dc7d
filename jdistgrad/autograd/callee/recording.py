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
from jdistgrad.autograd.callee.pullbacks import Map, differentiate
from jdistgrad.autograd.callee.state import state_argument
from jdistgrad.autograd.tape.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Target, mark, total
from jdistgrad.autograd.tape.tape import (
    Place,
    Tape,
    answer,
    current_tape,
    next_message,
    next_place,
    note_fetched,
    serving,
)
from jdistgrad.autograd.values.holes import Layout, as_jax, changed_structure, has_gradient, is_array, made, split
from jdistgrad.autograd.values.typed import MadeOf
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import ServedFunction
from jdistgrad.rpc.futures import answer_of
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.server import delivered


@dataclasses.dataclass(frozen=True)
class Lane:
    """A batch dimension that a leaf gets at the callee: each element has the same value, but a cotangent of its own."""

    leaf: int
    axis: int
    size: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.size, *shape[self.axis :])


@dataclasses.dataclass(frozen=True)
class RecordCall(MadeOf):
    """A function that keeps its pullbacks in the tape. The orders name leaves of its arguments by number.

    It takes references as such: gradients of their values go to their owners.
    """

    message: int
    orders: Orders
    place: Place
    lanes: tuple[Lane, ...] = ()  # added to wanted leaves in this order
    takes_references = True

    @property
    def recorded_as(self) -> int:
        return self.message

    def failed(self, error: BaseException) -> None:
        if isinstance(self.function, ServedFunction):
            self.function.failed(error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            recording = Recording(self.function, args, kwargs, self.orders, self.lanes)
            tape.record(self.message, recording)
            if not isinstance(self.function, Publishing):
                tape.links.append(answer(next_message(), self.message, self.label))
            return recording.result


class Recording:
    """A recorded call: its result, and everything its pullbacks need."""

    def __init__(self, function: Any, args: Any, kwargs: Any, orders: Orders, lanes: tuple[Lane, ...]):
        leaves = list(trees.leaves((args, kwargs)))
        named = {leaf for order in orders for leaf in order}
        holed, operands, leaf_of, references = _apart(leaves, named, lanes)
        rest = iter(holed)
        layout = Layout(trees.map_leaves(lambda _: next(rest), (args, kwargs)), ())
        # For each leaf of each order, its reference (None for an array), and the number of its operands.
        self._wanted = [
            [(leaves[k] if isinstance(leaves[k], RRef) else None, leaf_of.count(k)) for k in order] for order in orders
        ]
        owned = function.owned() if isinstance(function, Publishing) else None
        self._published = function.id if isinstance(function, Publishing) else None
        inner = function.function if isinstance(function, Publishing) else function
        has_references = references > (state_argument(inner) is not None)
        self.derived = differentiate(inner, layout, operands, named_among(leaf_of, orders), references=has_references)
        self.result = self.derived.result
        if owned is not None:
            owned.value.set_result(self.result)
            self.derived.result, self.result = None, NO_MARKS

    def pull(self, tape: Tape, pulled: "LinearCall", live: tuple[int, ...], cotangents: list[Any]) -> list[Any]:
        """Return the cotangents of the order's leaves, given those of the live results.

        If the result was published, ``cotangents`` holds its handle's, and the gradient is taken from the ledger.
        """
        maps = pulled.maps
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
        flat = iter(self.derived.linear(pulled.order, live, cotangents, maps))
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


def _apart(leaves: list[Any], named: set[int], lanes: tuple[Lane, ...]) -> tuple[list[Any], list[Any], list[int], int]:
    """Take the arguments of a recorded call apart: the arrays of named leaves and of their values are its operands.

    Returns the leaves, with values in place of references and holes in place of operands; the operands, with their
    lanes; the leaf of each operand; and the number of references that are left.
    """
    fetched = {leaf: leaf.value_future(math.inf) for leaf in leaves if isinstance(leaf, RRef)}
    values = {reference: future.result() for reference, future in fetched.items()}
    holed, operands, leaf_of, noted = list[Any](), list[Any](), list[int](), set[RRef[Any]]()
    references = sum(isinstance(leaf, ByReference) for leaf in leaves)
    for number, leaf in enumerate(leaves):
        is_value = isinstance(leaf, RRef)
        item = values[leaf] if is_value else leaf.rref if isinstance(leaf, ByReference) else leaf
        if number in named:
            layout, found = split(item, has_gradient if is_value else lambda _: True)
            item, references = layout.tree, references + (is_value and layout.has_references)
            for lane in lanes:
                if lane.leaf == number:
                    each = [(jnp.expand_dims(one, lane.axis), lane.shape(one.shape)) for one in found]
                    found = [jnp.broadcast_to(*one) for one in each]
            operands += found
            leaf_of += [number] * len(found)
            if is_value and leaf not in noted:
                noted.add(leaf)
                note_fetched(leaf.id, leaf.owner.rank)
        holed.append(item)
    return holed, operands, leaf_of, references


@dataclasses.dataclass(frozen=True)
class LinearCall(ServedFunction):
    """A linear function that a recorded call holds: the pull of cotangents, or the push of tangents, its argument.

    In a bundle, which is the same in every run, it has no message, number and place yet.
    """

    what: str
    order: int  # the number of the derivative
    live: tuple[int, ...] | None  # the results whose cotangents are pulled; None: it pushes tangents
    maps: tuple[Map, ...]
    last: bool = False
    call: int | None = None  # in a bundle, the turn of the stop that records the call, if it is there
    message: int = 0  # that made the recording
    number: int = 0  # the id of the contributions that a pull makes
    place: Place = ()

    @property
    def label(self) -> str:
        return f"the {'tangents' if self.live is None else 'pullback'} of {self.what}"

    @property
    def served_as(self) -> str:
        return events.SERVE if self.live is None else events.PULLBACK

    @property
    def recorded_as(self) -> int:
        return self.message

    def __call__(self, inputs: list[Any]) -> list[Any]:
        with serving(self.message, self.place):
            tape = current_tape(lambda: self.label)
            recording: Recording = tape.find(self.message, last=self.last)
            if self.live is None:
                return recording.derived.linear(self.order, None, inputs, self.maps)
            return recording.pull(tape, self, self.live, inputs)


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
        _, arrays = split(result, is_array)
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return as_jax(arrays)
