"""Gradients on their way: what was contributed to the values of a context, and who waits for how much of it.

A contribution counts as one for each lane it holds (a batched one holds several); whoever takes them knows how many
there must be. Sums are made in the order of the contributions' numbers, whatever order they came in.
"""

import concurrent.futures
import dataclasses
import functools
import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.tape.program_order import Place
from jdistgrad.errors import DifferentiationError

REFERENCE, CONTRIBUTION, TAKEN = "reference", "contribution", "taken"


class Node(NamedTuple):
    """Something that has a gradient here: the value of a reference, or a contribution somebody made.

    Derivatives of derivatives pass through contributions as first derivatives do through values.
    """

    kind: str
    id: int


@dataclasses.dataclass(slots=True)
class Contribution:
    """One part of a gradient: leaves, None where nothing is added. ``lanes``: the batch dimensions they begin with."""

    number: int
    lanes: tuple[int, ...]
    leaves: list[Any]
    place: Place = ()  # in the program's order

    def summed_over(self, lanes: tuple[int, ...]) -> list[Any]:
        """The leaves as somebody sees them who has these batch dimensions."""
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

    def count(self, lanes: tuple[int, ...]) -> int:
        return int(np.prod(self.lanes)) if not lanes else 1


@dataclasses.dataclass(slots=True)
class Waiting:
    """Somebody who needs so many contributions."""

    count: int
    lanes: tuple[int, ...]
    future: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)


Completed = tuple[Waiting, list[Contribution] | None]


class Ledger:
    """The contributions one worker has received in one context."""

    def __init__(self) -> None:
        self._found: dict[Node, list[Contribution]] = {}
        self._waiting: dict[Node, Waiting] = {}
        self._seen: set[tuple[Node, int]] = set()
        self._lock = threading.Lock()

    def put(self, node: Node, contribution: Contribution) -> None:
        with self._lock:
            if (node, contribution.number) in self._seen:
                return  # a pullback that was run again
            self._seen.add((node, contribution.number))
            self._found.setdefault(node, []).append(contribution)
            ready = self._complete(node)
        _finish(ready)

    def take(self, node: Node, count: int, lanes: tuple[int, ...] = ()) -> concurrent.futures.Future:
        """The contributions to a node, in order, once there are so many of them. They are gone then.

        They do not say of which backward pass they are: where more than one takes them at a time, none gets any.
        """
        waiting = Waiting(count, lanes)
        if not count:  # of a derivative that does not depend on the value: what is here is for others
            waiting.future.set_result([])
            return waiting.future
        with self._lock:
            other = self._waiting.pop(node, None)
            if other is None:
                self._waiting[node] = waiting
            ready = self._complete(node)
        for one in () if other is None else (other, waiting):
            one.future.set_exception(mixed_passes())
        _finish(ready)
        return waiting.future

    def read(self, node: Node) -> list[Contribution]:
        """What has been contributed so far, in order."""
        with self._lock:
            return in_order(self._found.get(node, []))

    def write(self, node: Node, leaves: list[Any]) -> None:
        """Put one gradient in the place of what was contributed."""
        with self._lock:
            self._found[node] = [Contribution(0, (), leaves)]

    def nodes(self) -> list[Node]:
        with self._lock:
            return list(self._found)

    def give_up(self, error: BaseException) -> None:
        """Nothing will come any more."""
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for one in waiting:
            one.future.set_exception(error)

    def _complete(self, node: Node) -> Completed | None:
        """Who takes, and all there is; None in its place where that is more than one pass has contributed."""
        waiting, found = self._waiting.get(node), self._found.get(node, [])
        there = 0 if waiting is None else sum(one.count(waiting.lanes) for one in found)
        if waiting is None or there < waiting.count:
            return None
        del self._waiting[node]
        return waiting, None if there > waiting.count else in_order(self._found.pop(node, []))


def _finish(ready: Completed | None) -> None:
    if ready is not None:
        waiting, found = ready
        waiting.future.set_exception(mixed_passes()) if found is None else waiting.future.set_result(found)


def mixed_passes() -> DifferentiationError:
    return DifferentiationError(
        "two backward passes go through the value of one reference at the same time, or one that failed has left its "
        "contributions there: they cannot be told apart. In compiled code let one of them need the other's result, or "
        "use rpc_sync in the place of remote; else open a context for each."
    )


def in_order(contributions: list[Contribution]) -> list[Contribution]:
    return sorted(contributions, key=lambda one: (one.place, one.number))


def total(contributions: list[Contribution], lanes: tuple[int, ...] = ()) -> list[Any]:
    """The sum of contributions, leaf by leaf; None where nothing was contributed."""
    if len(contributions) == 1:
        return list(contributions[0].summed_over(lanes))
    return [
        functools.reduce(_plus, leaves)
        for leaves in zip(*(one.summed_over(lanes) for one in contributions), strict=True)
    ]


def _plus(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b
