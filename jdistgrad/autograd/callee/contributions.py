"""The stops at the owners of values: reads, contributions to gradients, and their sums."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.bundle import Stop, send_alone
from jdistgrad.autograd.tape.ledger import AS_MADE, CONTRIBUTION, REFERENCE, TAKEN, Contribution, Marks, Target, total
from jdistgrad.autograd.tape.tape import current_tape, note_contribution
from jdistgrad.autograd.values.holes import (
    Layout,
    arrays_of,
    changed_structure,
    has_gradient,
    is_array,
    made,
    shape_of,
    split,
)
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.functions import describe, shown_as
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.worker import current_worker


@dataclasses.dataclass(unsafe_hash=True)
class AddStop(Stop):
    """A contribution to the gradient of a target: the leaves that are there are its items.

    ``numbers``: the target's id, the contribution's, and its place in the program's order.
    """

    kind: str
    lanes: tuple[int, ...]
    there: tuple[bool, ...]
    label = "a contribution to a gradient"
    takes_numpy: ClassVar[bool] = True

    def __call__(self, items: list[Any]) -> list[Any]:
        (target, number, *place), rest = self.numbers, iter(items)
        leaves = [next(rest) if one else None for one in self.there]
        tape, targets = current_tape(lambda: "a gradient"), [Target(self.kind, target)]
        if self.kind == TAKEN:  # it adds to all the contributions in a sum
            targets = [Target(CONTRIBUTION, one.number) for one in tape.taken[target]]
        for one in targets:
            tape.ledger.put(one, Contribution(number, self.lanes, leaves, tuple(place)))
        return []


@dataclasses.dataclass(unsafe_hash=True)
class TakeStop(Stop):
    """The sum of the contributions whose marks add up to its item, once all of them have come.

    ``numbers``: the target's id, and one under which the tape remembers the contributions, for derivatives of the sum.
    """

    kind: str
    lanes: tuple[int, ...]
    label = "the sum of contributions to a gradient"

    def __call__(self, items: list[Any]) -> list[Any]:
        tape, (target, taken) = current_tape(lambda: "a gradient"), self.numbers
        if taken not in tape.taken:
            marks = np.reshape(items[0], (-1, *NO_MARKS.shape))[0].tolist()  # the same in all lanes
            tape.taken[taken] = tape.ledger.take(Target(self.kind, target), marks, self.lanes).result()
        return total(tape.taken[taken], self.lanes)


@dataclasses.dataclass(unsafe_hash=True)
class ReadStop(Stop):
    """A read of the arrays of a value owned here, which has been made. ``numbers``: its id."""

    count: int
    label = "the fetch of a reference's value"
    takes_numpy: ClassVar[bool] = True

    def __call__(self, items: list[Any]) -> list[Any]:
        arrays = arrays_of(current_worker().references.owned.value(self.numbers[0]).result())
        if len(arrays) != self.count:
            raise changed_structure(len(arrays), self.count)
        return arrays


@dataclasses.dataclass(unsafe_hash=True)
class UseStop(Stop):
    """A function of the gradients of some values, which waits until all contributions to them have come.

    Items: for each value the marks of these contributions, in parts to be added up; then other arguments of the
    function. The contributions stay in the ledger.

    ``uses``: the function, which is one of this package. ``references``: their ids. ``values``: their names.
    """

    uses: Any
    references: tuple[int, ...]
    values: tuple[str, ...]
    parts: tuple[int, ...]
    takes_numpy: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return describe(self.uses)

    def __call__(self, items: list[Any]) -> list[Any]:
        ledger, items, count = current_tape(lambda: self.label).ledger, made(items), sum(self.parts)
        targets = zip(self.references, self.summed(items[:count]), strict=True)
        futures = [ledger.take(Target(REFERENCE, reference), mine, keep=True) for reference, mine in targets]
        seconds = current_worker().timeout / 2  # not as long as the caller waits for this answer
        try:
            gradients = [total(future.result(seconds)) for future in futures]
        except concurrent.futures.TimeoutError as error:
            raise DifferentiationError(
                f"{self.label} has waited {seconds:g} s for contributions that {', '.join(self.values)} did not get. "
                f"{AS_MADE}"
            ) from error
        return [self.uses(gradients, *items[count:])]

    def summed(self, marks: Sequence[Any]) -> list[Marks]:
        """Return the sum of the marks of each value. Raises DifferentiationError for a value without contributions."""
        rest, found = iter(marks), list[Marks]()
        for value, count in zip(self.values, self.parts, strict=True):
            each = [np.asarray(next(rest)).tolist() for _ in range(count)]
            mine = tuple(each[0] if len(each) == 1 else map(sum, zip(*each, strict=True)))
            if not all(part >= 0 and part == int(part) for part in mine):
                why = f"{self.label}: this is not the gradient of {value} as it was made. {AS_MADE}"
                raise DifferentiationError(why)
            found.append(mine)
        missing = [value for value, mine in zip(self.values, found, strict=True) if not mine[0]]
        if missing:
            raise DifferentiationError(
                f"{self.label} has no gradient of {', '.join(missing)}: what was differentiated does not depend on it. "
                "Use it there, or leave the reference out. If it is used as a part of another value, which holds the "
                "reference, step with the context: optimizer.step(ctx).",
                missing=missing,
            )
        return found


def contribute(owner: int, kind: str, identifier: int, contribution: Contribution) -> None:
    """Send a contribution to the owner of the value; return once the owner has it."""
    note_contribution(owner, identifier, contribution.number)
    numbers = identifier, contribution.number, *contribution.place
    stop = AddStop(kind, contribution.lanes, tuple(one is not None for one in contribution.leaves))
    items = [one for one in contribution.leaves if one is not None]
    if owner == current_worker().rank:
        stop.of_run(None, numbers)(items)
    else:
        send_alone(owner, stop, None, numbers, items, None).result()


@shown_as("the fetch of a reference's gradient")
def gradient_of(identifier: int, name: str, marks: Marks | None) -> Any:
    """Return the gradient, in the current context, of a value owned here: zero where nothing was contributed.

    Arguments:
      name: the reference, in words.
      marks: the sum of the marks of its contributions, if known: others may be there, too.
    """
    ledger, target = current_tape(lambda: "a gradient").ledger, Target(REFERENCE, identifier)
    found = ledger.read(target) if marks is None else ledger.find(target, marks)
    if found is None:
        raise DifferentiationError(f"the fetched gradient of {name} is not what the calls contributed. {AS_MADE}")
    return gradient_tree(identifier, total(found) if found else None)


def gradient_tree(identifier: int, leaves: list[Any] | None) -> Any:
    """Return a gradient in the structure of its value, with None in place of leaves that have no derivative."""
    value = current_worker().references.owned.value(identifier).result()
    layout, arrays = split(value, has_gradient)
    found = leaves or [None] * len(arrays)
    return layout.only_holes().fill(
        [jnp.zeros_like(one) if leaf is None else jnp.asarray(leaf) for leaf, one in zip(found, arrays, strict=True)]
    )


def value_layout(rref: Any) -> tuple[Layout, list[jax.ShapeDtypeStruct]]:
    layout, arrays = split(rref.local_value(), is_array)
    return layout, [shape_of(one) for one in arrays]
