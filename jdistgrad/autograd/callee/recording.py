"""The stops of calls: a function is called, recorded or not, and its recording is pulled or pushed through.

A recording waits in the tape until the cotangents come.
"""

import collections
import dataclasses
import functools
import itertools
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jdistgrad import events
from jdistgrad.autograd.callee.bundle import Stop
from jdistgrad.autograd.callee.contributions import contribute
from jdistgrad.autograd.callee.derivatives import Orders, named_among
from jdistgrad.autograd.callee.functions import state_argument
from jdistgrad.autograd.callee.pullbacks import Map, differentiate
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Target, mark, total
from jdistgrad.autograd.tape.tape import answer, current_tape, next_message, next_place, note_fetched, serving
from jdistgrad.autograd.values.holes import Layout, as_jax, changed_structure, has_gradient, is_array, made, split
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.futures import answer_of
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.owned import Owned
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.server import delivered
from jdistgrad.rpc.worker import current_worker

AGAIN = 1 << 36  # between the ids of contributions to one reference in one pull; no worker draws so many ids


@dataclasses.dataclass(frozen=True)
class Lane:
    """A batch dimension that a leaf gets at the callee: each element has the same value, but a cotangent of its own."""

    leaf: int
    axis: int
    size: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.size, *shape[self.axis :])


@dataclasses.dataclass(unsafe_hash=True)
class CallStop(Stop):
    """A call of a function. ``orders``: the leaves of its arguments to record pullbacks for; if empty, none.

    ``arguments``: the arguments with holes for the items; None if the items are the arguments, and keyword
    arguments if there are some. ``count``: the number of arrays the function returns; None if its result goes back
    as it is. ``is_closed``: whether there are no references among its arguments. A recorded function takes these as
    such: gradients of their values go to their owners. ``publishes``: whether the result stays here, under the last
    of the numbers. The tape keeps the stop of a recorded call, with what its pullbacks need.
    """

    arguments: Layout | None = None
    orders: Orders = ()
    lanes: tuple[Lane, ...] = ()  # added to wanted leaves in this order
    count: int | None = None
    is_closed: bool = True
    publishes: bool = False

    @property
    def label(self) -> str:
        return describe(self.function)

    @functools.cached_property
    def owned(self) -> Owned:
        """Announce the value that stays here; return the entry with the promise of the value."""
        return current_worker().references.owned.announce(self.numbers[-1])

    def failed(self, error: BaseException) -> None:
        """Fail the value, so that nothing waits for it: the call has failed, perhaps before the function ran."""
        if self.publishes and not (promise := self.owned.value).done():
            promise.set_exception(error)

    def __call__(self, items: list[Any]) -> Any:
        if self.orders:
            with serving(self.numbers[0], self.place):
                tape = current_tape(lambda: self.label)
                result = self.recorded(items)
                tape.record(self.numbers[0], self)
                if not self.publishes:
                    tape.links.append(answer(next_message(), self.numbers[0], self.label))
                return result if self.count is None else self._arrays(result)
        promise = self.owned.value if self.publishes else None
        args, kwargs = delivered(*self._filled(items))
        result = self.function(*args, **kwargs)
        if promise is not None:
            promise.set_result(answer_of(result))
            return NO_MARKS
        return result if self.count is None else self._arrays(answer_of(result))

    def traced(self, turn: int, items: list[Any], recordings: dict[int | None, Any]) -> list[Any]:
        if not self.orders:
            found: list[Any] = self(items)
            return found
        recordings[turn] = self
        return self._arrays(self.recorded(items))

    def recorded(self, items: list[Any]) -> Any:
        """Run the function, and keep its pullbacks; return its result."""
        args, kwargs = self._filled(items)
        leaves = list(trees.leaves((args, kwargs)))
        named = {leaf for order in self.orders for leaf in order}
        holed, operands, leaf_of, references = _apart(leaves, named, self.lanes)
        rest = iter(holed)
        layout = Layout(trees.map_leaves(lambda _: next(rest), (args, kwargs)), ())
        # For each leaf of each order, its reference (None for an array), and the number of its operands.
        self._wanted = [
            [(leaves[k] if isinstance(leaves[k], RRef) else None, leaf_of.count(k)) for k in order]
            for order in self.orders
        ]
        promise = self.owned.value if self.publishes else None
        orders, hidden = named_among(leaf_of, self.orders), references > (state_argument(self.function) is not None)
        self.derived = differentiate(self.function, layout, operands, orders, references=hidden)
        if promise is None:
            return self.derived.result  # it is kept: the caller may count on the references in it
        promise.set_result(self.derived.result)
        self.derived.result = None
        return NO_MARKS

    def _filled(self, items: list[Any]) -> tuple[Any, Any]:
        if self.arguments is not None:
            return self.arguments.fill(made(items))
        args, kwargs = (*items, {})[:2]
        return args, kwargs

    def _arrays(self, result: Any) -> list[Any]:
        _, arrays = split(result, is_array)
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count or 0)
        return as_jax(arrays)

    def pull(
        self, order: int, live: tuple[int, ...], cotangents: list[Any], maps: tuple[Map, ...], number: int
    ) -> list[Any]:
        """Return the cotangents of the order's leaves, given those of the live results.

        If the result was published, ``cotangents`` holds its handle's, and the gradient is taken from the ledger.
        ``number``: the id of the contributions that the pull makes.
        """
        lanes = tuple(one.size for one in reversed(maps))
        if self.publishes:
            marks = np.asarray(cotangents[0])
            given = marks.shape[: marks.ndim - NO_MARKS.ndim]
            first = marks.reshape(-1, *NO_MARKS.shape)[0].tolist()
            ledger = current_tape(lambda: "a gradient").ledger
            sums = as_jax(total(ledger.take(Target(REFERENCE, self.numbers[-1]), first, given).result(), given))
            live = tuple(k for k, one in enumerate(sums) if one is not None)
            maps = tuple(dataclasses.replace(one, flags=(True,) * len(live)) for one in maps)
            cotangents = [sums[k] for k in live]
        flat = iter(self.derived.linear(order, live, cotangents, maps))
        shape = *lanes, *NO_MARKS.shape
        # The gradients of references go to their owners, and the marks of these contributions back to the caller.
        found, passed = list[Any](), collections.Counter[RRef[Any]]()
        for wanted, count in self._wanted[order]:
            part = list(itertools.islice(flat, count))
            if wanted is None:
                found.append(part[0])
                continue
            own = number + AGAIN * passed[wanted]
            passed[wanted] += 1
            contribute(wanted.owner.rank, REFERENCE, wanted.id, Contribution(own, lanes, part, next_place()))
            found.append(np.full(shape, mark(own), NO_MARKS.dtype))
        return found


@dataclasses.dataclass(unsafe_hash=True)
class LinearStop(Stop):
    """A linear function that a recorded call holds: the pull of cotangents, or the push of tangents, its items."""

    what: str
    order: int  # the number of the derivative
    live: tuple[int, ...] | None  # the results whose cotangents are pulled; None: it pushes tangents
    maps: tuple[Map, ...]
    last: bool = False
    call: int | None = None
    follows: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"the {'tangents' if self.live is None else 'pullback'} of {self.what}"

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
            recording: CallStop = current_tape(lambda: self.label).find(message, last=self.last)
            if self.live is None:
                return recording.derived.linear(self.order, None, items, self.maps)
            return recording.pull(self.order, self.live, items, self.maps, *rest)


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
