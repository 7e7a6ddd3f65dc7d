"""The ledger: contributions to the gradients of a context's values, and the takes that wait for them.

A contribution counts once for each lane, which is an element of its batch dimensions. A take knows the sum of the marks
of its contributions: how many there must be, and which. Contributions are added in the program's order, whatever order
they arrived in.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdistgrad.errors import DifferentiationError

REFERENCE, CONTRIBUTION, TAKEN = "reference", "contribution", "taken"
REPLACED = 0  # the number of what is written in place of contributions

AS_MADE = (
    "A gradient of a reference can be neither scaled nor clipped, nor added to itself. Scale the loss, or let the "
    "transformation do it: optax.chain(optax.scale(...), ...), DistributedOptimizer(max_global_norm=...). Nor can the "
    "rule of a jax.custom_vjp around a call change it: put the rule into the called function, or around to_here()."
)

EXACT = 4096  # the most contributions whose marks add up exactly in float32
IN_TURN = 8  # the most places that may contribute in turn, such as two uses of one reference in each layer
TRIED, DEEPEST = 100_000, 300  # the most marks that a search for a sum may try, and that the sum may have


Marks = tuple[float, ...]


def mark(number: int) -> Marks:
    """Return the marks a contribution adds to a handle's cotangent: a one, and four numbers that identify it.

    They come from a hash (the last steps of SplitMix64): sums of marks of neighbouring ids must differ.
    """
    mixed = (number + 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % (1 << 64)
    mixed ^= mixed >> 31
    return 1.0, *(float(mixed >> shift & (EXACT - 1)) for shift in (0, 13, 26, 39))


class Target(NamedTuple):
    """Something that has a gradient here: the value of a reference, or a contribution.

    Derivatives of derivatives pass through contributions as first derivatives pass through values.
    """

    kind: str
    id: int


@dataclasses.dataclass(slots=True)
class Contribution:
    """A part of a gradient: leaves, None where it adds nothing. ``lanes``: the sizes of their batch dimensions."""

    number: int
    lanes: tuple[int, ...]
    leaves: list[Any]
    place: tuple[int, ...] = ()  # in the program's order, see ``tape/tape``

    def summed_over(self, lanes: tuple[int, ...]) -> list[Any]:
        """Return the leaves with these batch dimensions: summed over their own, or broadcast."""
        if self.lanes == lanes:
            return self.leaves
        if not lanes:
            axes = tuple(range(len(self.lanes)))
            return [None if leaf is None else jnp.sum(leaf, axes) for leaf in self.leaves]
        if not self.lanes:
            return [None if leaf is None else jnp.broadcast_to(leaf, lanes + leaf.shape) for leaf in self.leaves]
        raise DifferentiationError(
            f"gradients of one reference come in batches of {self.lanes} and {lanes}. Take them in one vmap, or fetch "
            "the reference's value before vmap.",
        )


@dataclasses.dataclass(slots=True, eq=False)
class Waiting:
    """A take that waits for the contributions whose marks have this sum. ``keep``: they stay in the ledger."""

    marks: Marks
    lanes: tuple[int, ...]
    keep: bool = False
    future: concurrent.futures.Future[Any] = dataclasses.field(default_factory=concurrent.futures.Future)

    def among(self, found: list[Contribution]) -> list[Contribution] | None:
        """Return the take's contributions if all have come, else None. Others may belong to another backward pass."""
        counts = [1 if self.lanes else math.prod(one.lanes) for one in found]
        there, count = sum(counts), self.marks[0]
        if there < count:
            return None
        if count > EXACT:  # the other marks are inexact: only the count is known
            if there > count:
                raise mixed_passes()
            return found
        each = [tuple(part * times for part in mark(one.number)) for one, times in zip(found, counts, strict=True)]
        if there == count:
            return found if tuple(map(sum, zip(*each, strict=True))) == self.marks else None
        chosen = _adding_up(each, self.marks)
        return None if chosen is None else [found[k] for k in chosen]


def _adding_up(each: list[Marks], wanted: Marks) -> list[int] | None:
    """Find the marks that have this sum, or the others, which have the rest: first such as come in turn."""
    rest: Marks = tuple((np.sum(each, axis=0) - wanted).tolist())
    if min(*wanted, *rest) < 0:
        return None
    for search, sums in ((_in_turn, (wanted, rest)), (_some, (min(wanted, rest),))):
        for one in sums:
            chosen = search(each, one)
            if chosen is not None:
                return chosen if one is wanted else sorted({*range(len(each))} - {*chosen})
    return None


def _in_turn(each: list[Marks], wanted: Marks) -> list[int] | None:
    """Find marks with this sum at equal distances, as of a pass, or of one of several places in turn."""
    for stride in range(1, IN_TURN + 1):
        for first in range(stride):
            numbers = range(first, len(each), stride)
            sums = np.cumsum([np.zeros(len(wanted)), *(each[k] for k in numbers)], axis=0)
            ends = {tuple(one): k for k, one in enumerate(sums.tolist())}
            for start in range(len(numbers) - 1, -1, -1):  # the latest pass is likely
                end = ends.get(tuple((sums[start] + wanted).tolist()), 0)
                if start < end:
                    return list(numbers[start:end])
    return None


def _some(each: list[Marks], wanted: Marks) -> list[int] | None:
    """Find any marks with this sum, the latest first."""
    tried = 0

    def search(last: int, left: Marks) -> list[int] | None:
        nonlocal tried
        if not left[0]:
            return None if any(left) else []
        for k in range(last, -1, -1):
            tried += 1
            if tried > TRIED or left[0] > DEEPEST:
                raise mixed_passes()
            less = tuple(a - b for a, b in zip(left, each[k], strict=True))
            if min(less) >= 0:
                rest = search(k - 1, less)
                if rest is not None:
                    return [*rest, k]
        return None

    return search(len(each) - 1, wanted)


Completed = tuple[Waiting, "list[Contribution] | BaseException"]


class Ledger:
    """The contributions one worker has received in one context."""

    def __init__(self) -> None:
        self._found = collections.defaultdict[Target, list[Contribution]](list)
        self._waiting = collections.defaultdict[Target, list[Waiting]](list)
        self._used: dict[tuple[Target, Marks], list[Contribution]] = {}
        self._kept: dict[Target, list[Contribution]] = {}  # what uses have found; others need not search there
        self._seen: set[tuple[Target, int]] = set()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def put(self, target: Target, contribution: Contribution) -> None:
        with self._lock:
            if (target, contribution.number) in self._seen:
                return  # the pullback was run again
            self._seen.add((target, contribution.number))
            self._found[target].append(contribution)
            ready = self._complete(target)
        _finish(ready)

    def take(
        self, target: Target, marks: Sequence[float], lanes: tuple[int, ...] = (), *, keep: bool = False
    ) -> concurrent.futures.Future[Any]:
        """Remove the contributions to a target whose marks have this sum; return a future of them, in order.

        If they have been replaced (by an average over ranks, say), the future is of what has replaced them. ``keep``:
        they stay in the ledger.
        """
        waiting = Waiting(tuple(marks), lanes, keep)
        if not marks[0]:  # the derivative does not depend on the value: any contributions here belong to other takes
            waiting.future.set_result([])
            return waiting.future
        with self._lock:
            before = self._used.get((target, waiting.marks))
            if before is None:
                self._waiting[target].append(waiting)
            ready: list[Completed] = [(waiting, before)] if before is not None else self._complete(target)
            if self._error is not None and waiting in self._waiting[target]:
                self._waiting[target].remove(waiting)
                ready.append((waiting, self._error))
        _finish(ready)
        return waiting.future

    def read(self, target: Target) -> list[Contribution]:
        with self._lock:
            return in_order([*self._kept.get(target, []), *self._found[target]])

    def find(self, target: Target, marks: Marks) -> list[Contribution] | None:
        """Return the contributions that are here and whose marks have this sum, or what has replaced them."""
        with self._lock:
            used = [] if not marks[0] else self._used.get((target, marks))
        if used is not None:
            return used
        found = self.read(target)
        replaced = [one for one in found if one.number == REPLACED]
        mine = Waiting(marks, ()).among([one for one in found if one.number != REPLACED])
        return in_order(mine) if mine is not None else replaced or None

    def write(self, target: Target, leaves: list[Any]) -> None:
        """Replace the contributions to a target by one gradient."""
        with self._lock:
            replaced = [mark(one.number) for one in self._found.pop(target, [])]
            new = Contribution(REPLACED, (), leaves)
            self._kept[target] = [new]
            for key in [key for key in self._used if key[0] == target]:
                self._used[key] = [new]
            if replaced:
                self._used[target, tuple(map(sum, zip(*replaced, strict=True)))] = [new]

    def targets(self) -> list[Target]:
        with self._lock:
            return list({**self._kept, **{target: found for target, found in self._found.items() if found}})

    def give_up(self, error: BaseException) -> None:
        """Fail all takes that wait with this error, now and later: no more contributions will arrive."""
        with self._lock:
            self._error = error
            waiting = [one for each in self._waiting.values() for one in each]
            self._waiting.clear()
        for one in waiting:
            one.future.set_exception(error)

    def _complete(self, target: Target) -> list[Completed]:
        """Remove the takes that can be completed now; return each with its contributions or its error."""
        ready: list[Completed] = []
        for waiting in list(self._waiting[target]):
            try:
                mine = waiting.among(self._found[target])
            except DifferentiationError as error:
                self._waiting[target].remove(waiting)
                ready.append((waiting, error))
                continue
            if mine is not None:
                self._waiting[target].remove(waiting)
                taken = {id(one) for one in mine}
                self._found[target] = [one for one in self._found[target] if id(one) not in taken]
                if waiting.keep:
                    self._kept.setdefault(target, []).extend(mine)
                    self._used[target, waiting.marks] = in_order(mine)
                ready.append((waiting, in_order(mine)))
        return ready


def _finish(ready: list[Completed]) -> None:
    for waiting, found in ready:
        if isinstance(found, BaseException):
            waiting.future.set_exception(found)
        else:
            waiting.future.set_result(found)


def mixed_passes() -> DifferentiationError:
    return DifferentiationError(
        "several gradients of one reference have so many contributions that they cannot be distinguished. Open a "
        "context for each backward pass, and differentiate a reference that is used at several places once."
    )


def in_order(contributions: list[Contribution]) -> list[Contribution]:
    return sorted(contributions, key=lambda one: (one.place, one.number))


def total(contributions: list[Contribution], lanes: tuple[int, ...] = ()) -> list[Any]:
    """Return the sum of contributions, leaf by leaf; None where nothing was contributed."""
    if len(contributions) == 1:
        return list(contributions[0].summed_over(lanes))
    each = zip(*(one.summed_over(lanes) for one in contributions), strict=True)
    parts = [[part for part in leaves if part is not None] for leaves in each]
    return [functools.reduce(operator.add, one) if one else None for one in parts]
