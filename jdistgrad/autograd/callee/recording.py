"""A recorded call: its function has run, and its pullbacks wait in the tape until the cotangents come."""

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.contributions import contribute
from jdistgrad.autograd.callee.functions import Publishing
from jdistgrad.autograd.callee.orders import Orders, named_among
from jdistgrad.autograd.callee.pullbacks import Map, differentiate
from jdistgrad.autograd.callee.state import state_argument
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Target, mark, total
from jdistgrad.autograd.tape.tape import current_tape, next_place, note_fetched
from jdistgrad.autograd.values.holes import Layout, as_jax, has_gradient, split
from jdistgrad.rpc import trees
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import ByReference, RRef


@dataclasses.dataclass(frozen=True)
class Lane:
    """A batch dimension that a leaf gets at the callee: each element has the same value, but a cotangent of its own."""

    leaf: int
    axis: int
    size: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[: self.axis], self.size, *shape[self.axis :])


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

    def pull(
        self, order: int, live: tuple[int, ...], cotangents: list[Any], maps: tuple[Map, ...], number: int
    ) -> list[Any]:
        """Return the cotangents of the order's leaves, given those of the live results.

        If the result was published, ``cotangents`` holds its handle's, and the gradient is taken from the ledger.
        ``number``: the id of the contributions that the pull makes.
        """
        lanes = tuple(one.size for one in reversed(maps))
        if self._published is not None:
            marks = np.asarray(cotangents[0])
            given = marks.shape[: marks.ndim - NO_MARKS.ndim]
            first = marks.reshape(-1, *NO_MARKS.shape)[0].tolist()
            taken = (
                current_tape(lambda: "a gradient")
                .ledger.take(Target(REFERENCE, self._published), first, given)
                .result()
            )
            sums = as_jax(total(taken, given))
            live = tuple(k for k, one in enumerate(sums) if one is not None)
            maps = tuple(dataclasses.replace(one, flags=(True,) * len(live)) for one in maps)
            cotangents = [sums[k] for k in live]
        flat = iter(self.derived.linear(order, live, cotangents, maps))
        marks = np.full((*lanes, *NO_MARKS.shape), mark(number), NO_MARKS.dtype)
        # The gradients of references go to their owners, and the marks of these contributions back to the caller.
        found, gradients = list[Any](), dict[RRef[Any], list[Any]]()
        for wanted, count in self._wanted[order]:
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
            contribution = Contribution(number, lanes, leaves, next_place())
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
