"""Requests that may share a message: fetch an existing value, add to a gradient, run a task after the additions.

No request is delayed for the sake of grouping, but the one answer comes when all tasks are done.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.autograd.tape.contributions import accept
from jdistgrad.autograd.tape.ledger import Contribution
from jdistgrad.autograd.values.holes import arrays_of
from jdistgrad.autograd.values.operation import Started
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.arrays import ArrayBlock

Task = tuple[Any, tuple[Any, ...]]  # a function and its arguments
Addition = tuple[str, int, Contribution]  # the kind and the id of a target, and what is added to its gradient


@dataclasses.dataclass
class Request:
    """A request to a worker: for the arrays of a value it owns, to accept a contribution, or to run a task.

    ``known``: outputs that need no answer. ``finish`` turns the arrays into the other outputs. ``kept``: an object kept
    alive until then.
    """

    to: int
    value: int | None
    addition: Addition | None
    finish: Callable[[list[Any]], list[Any]]
    known: Sequence[Any] = ()
    kept: Any = None
    task: Task | None = None  # returns an array


def send(requests: Sequence[Request]) -> list[Started]:
    """Send requests to one worker, in one message."""
    values = list(dict.fromkeys(one.value for one in requests if one.value is not None))
    additions = [one.addition for one in requests if one.addition is not None]
    tasks = [one.task for one in requests if one.task is not None]
    parts = ArrayBlock([leaf for _, _, part in additions for leaf in part.leaves if leaf is not None])
    # A fetch must not make the owner take part in the context.
    with within(current_scope() if additions or tasks else None):
        args = (values, [_without_arrays(*addition) for addition in additions], parts, tasks)
        future = current_worker().rpc_async(requests[0].to, serve_requests, args, {}, None)
    asking = [one for one in requests if one.task is not None]
    places = {id(one): len(values) + turn for turn, one in enumerate(asking)}
    places |= {id(one): values.index(one.value) for one in requests if one.value is not None}
    return [Started(future, _Part(one, places.get(id(one))), one.known) for one in requests]


def _without_arrays(kind: str, identifier: int, part: Contribution) -> tuple[Any, ...]:
    """Return an addition without its arrays: in place of each leaf, whether it is present."""
    return kind, identifier, part.number, part.lanes, [leaf is not None for leaf in part.leaves], part.place


@dataclasses.dataclass
class _Part:
    """A request's part of the answer, by its place among what was asked for; None: no arrays."""

    request: Request
    place: int | None

    def __call__(self, answer: tuple[list[int], list[Any]]) -> list[Any]:
        if self.place is None:
            return self.request.finish([])
        counts, arrays = answer
        start = sum(counts[: self.place])
        return self.request.finish(list(arrays[start : start + counts[self.place]]))


def serve_requests(
    values: list[int], additions: list[tuple[Any, ...]], parts: list[Any], tasks: list[Task]
) -> tuple[list[int], ArrayBlock]:
    """Read the values, accept the additions, run the tasks; return the numbers of arrays, and all arrays."""
    owned = current_worker().references.owned
    found = [arrays_of(owned.value(one).result()) for one in values]
    rest = iter(parts)
    for kind, identifier, number, lanes, there, place in additions:
        leaves = [next(rest) if one else None for one in there]
        accept(kind, identifier, Contribution(number, lanes, leaves, place))
    found += [[function(*args)] for function, args in tasks]
    return [len(arrays) for arrays in found], ArrayBlock([array for arrays in found for array in arrays])
