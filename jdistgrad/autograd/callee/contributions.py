"""Contributions to gradients, which go to the owners of values, and the sums that the owners return."""

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jdistgrad.autograd.callee.bundle import Stop, send_alone
from jdistgrad.autograd.tape.ledger import AS_MADE, CONTRIBUTION, REFERENCE, TAKEN, Contribution, Marks, Target, total
from jdistgrad.autograd.tape.tape import Place, current_tape, gradient_link
from jdistgrad.autograd.values.holes import (
    Layout,
    arrays_of,
    changed_structure,
    has_gradient,
    is_array,
    shape_of,
    split,
)
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.worker import current_worker


@dataclasses.dataclass(frozen=True)
class AddStop(Stop):
    """A contribution to the gradient of a target: the leaves that are there are its items.

    ``numbers``: the target's id, the contribution's, and its place in the program's order.
    """

    kind: str
    lanes: tuple[int, ...]
    there: tuple[bool, ...]
    label = "a contribution to a gradient"
    takes_numpy: ClassVar[bool] = True
    recorded_as = None

    def __call__(self, items: list[Any]) -> list[Any]:
        (target, number, *place), rest = self.numbers, iter(items)
        leaves = [next(rest) if one else None for one in self.there]
        accept(self.kind, target, Contribution(number, self.lanes, leaves, tuple(place)))
        return []


@dataclasses.dataclass(frozen=True)
class ReadStop(Stop):
    """A read of the arrays of a value owned here, which has been made. ``numbers``: its id."""

    count: int
    label = "the fetch of a reference's value"
    takes_numpy: ClassVar[bool] = True
    recorded_as = None

    def __call__(self, items: list[Any]) -> list[Any]:
        arrays = arrays_of(current_worker().references.owned.value(self.numbers[0]).result())
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return arrays


def contribute(owner: int, kind: str, identifier: int, contribution: Contribution) -> None:
    """Send a contribution to the owner of the value; return once the owner has it."""
    if owner == current_worker().rank:
        accept(kind, identifier, contribution)
        return
    numbers = noted_contribution(owner, identifier, contribution.number, contribution.place)
    there = tuple(one is not None for one in contribution.leaves)
    items = [one for one in contribution.leaves if one is not None]
    send_alone(owner, AddStop(kind, contribution.lanes, there), items, None, numbers).result()


def noted_contribution(owner: int, identifier: int, number: int, place: Place) -> tuple[int, ...]:
    """Note that a contribution goes to the owner of its value, if to another; return the numbers of its stop."""
    if owner != current_worker().rank:
        current_tape(lambda: "a gradient").links.append(gradient_link(number, owner, identifier))
    return identifier, number, *place


def accept(kind: str, identifier: int, contribution: Contribution) -> None:
    """Add to the gradient of a value here, of a contribution, or of all the contributions in a sum that was taken."""
    tape, targets = current_tape(lambda: "a gradient"), [Target(kind, identifier)]
    if kind == TAKEN:
        targets = [Target(CONTRIBUTION, one.number) for one in tape.taken[identifier]]
    for target in targets:
        tape.ledger.put(target, contribution)


def take(
    kind: str, identifier: int, marks: tuple[float, ...], lanes: tuple[int, ...], taken: int
) -> concurrent.futures.Future[Any]:
    """Return a future of the sum of the contributions whose marks add up to ``marks``, done once all of them have come.

    Arguments:
      taken: the id under which the tape remembers the contributions, for derivatives of their sum.
    """
    tape = current_tape(lambda: "a gradient")
    if taken in tape.taken:
        summed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        summed.set_result(total(tape.taken[taken], lanes))
        return summed

    def add_up(contributions: list[Contribution]) -> list[Any]:
        tape.taken[taken] = contributions
        return total(contributions, lanes)

    return _then(tape.ledger.take(Target(kind, identifier), marks, lanes), add_up)


def _then(future: concurrent.futures.Future[Any], function: Callable[[Any], Any]) -> concurrent.futures.Future[Any]:
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def make(done: concurrent.futures.Future[Any]) -> None:
        try:
            made.set_result(function(done.result()))
        except BaseException as error:
            made.set_exception(error)

    future.add_done_callback(make)
    return made


@shown_as("the fetch of a reference's gradient")
def gradient_of(identifier: int, name: str, marks: Marks | None) -> Any:
    """Return the gradient, in the current context, of a value owned here: zero where nothing was contributed.

    Arguments:
      name: the reference, in words.
      marks: the sum of the marks of its contributions, if known: others may be there, too.
    """
    tape = current_tape(lambda: "a gradient")
    if marks is not None and not tape.ledger.may_be_sum(Target(REFERENCE, identifier), marks):
        raise DifferentiationError(f"the fetched gradient of {name} is not what the calls contributed. {AS_MADE}")
    return gradient_tree(identifier, tape.gradient(identifier))


def value_gradient(identifier: int) -> Any | None:
    """Return the same as ``gradient_of``, or None if nothing was contributed."""
    leaves = current_tape(lambda: "a gradient").gradient(identifier)
    return None if leaves is None else gradient_tree(identifier, leaves)


def gradient_tree(identifier: int, leaves: list[Any] | None) -> Any:
    """Return a gradient in the structure of its value, with None in place of leaves that have no derivative."""
    value = current_worker().references.owned.value(identifier).result()
    layout, arrays = split(value, has_gradient)
    found = leaves or [None] * len(arrays)
    return layout.only_holes().fill(
        [jnp.asarray(or_zero(leaf, array)) for leaf, array in zip(found, arrays, strict=True)]
    )


def or_zero(leaf: Any, array: Any) -> Any:
    return jnp.zeros_like(array) if leaf is None else leaf


def value_layout(rref: Any) -> tuple[Layout, list[jax.ShapeDtypeStruct]]:
    layout, arrays = split(rref.local_value(), is_array)
    return layout, [shape_of(one) for one in arrays]


def arrays_of_value(identifier: int) -> concurrent.futures.Future[Any]:
    """Return a future of the arrays of a value owned here, done once the value has been made."""
    return _then(current_worker().references.owned.value(identifier), arrays_of)
