"""Requests that an owner can serve at once: fetch an existing value, add to a gradient. Several may share a message.

No request is delayed for the sake of grouping.
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
from jdistgrad.wire.array_block import ArrayBlock

Addition = tuple[str, int, Contribution]  # the kind and the id of a target, and what is added to its gradient


@dataclasses.dataclass
class Request:
    """A request to a worker: for the arrays of a value it owns, or to accept a contribution to a gradient.

    ``known``: outputs that need no answer. ``finish`` turns the arrays into the other outputs. ``kept``: an object kept
    alive until then.
    """

    to: int
    value: int | None
    addition: Addition | None
    finish: Callable[[list[Any]], list[Any]]
    known: Sequence[Any] = ()
    kept: Any = None


def send(requests: Sequence[Request]) -> list[Started]:
    """Send requests to one worker, in one message."""
    values = list(dict.fromkeys(one.value for one in requests if one.value is not None))
    additions = [one.addition for one in requests if one.addition is not None]
    parts = ArrayBlock([leaf for _, _, part in additions for leaf in part.leaves if leaf is not None])
    with within(current_scope() if additions else None):  # a fetch must not make the owner take part in the context
        args = (values, [_without_arrays(*addition) for addition in additions], parts)
        future = current_worker().rpc_async(requests[0].to, serve_requests, args, {}, None)
    return [Started(future, _Part(one, values), one.known) for one in requests]


def _without_arrays(kind: str, identifier: int, part: Contribution) -> tuple[Any, ...]:
    """Return an addition without its arrays: in place of each leaf, whether it is present."""
    return kind, identifier, part.number, part.lanes, [leaf is not None for leaf in part.leaves], part.place


@dataclasses.dataclass
class _Part:
    """A request's part of the answer."""

    request: Request
    values: list[int]

    def __call__(self, answer: tuple[list[int], list[Any]]) -> list[Any]:
        if self.request.value is None:
            return self.request.finish([])
        counts, arrays = answer
        place = self.values.index(self.request.value)
        start = sum(counts[:place])
        return self.request.finish(list(arrays[start : start + counts[place]]))


def serve_requests(
    values: list[int], additions: list[tuple[Any, ...]], parts: list[Any]
) -> tuple[list[int], ArrayBlock]:
    """Accept the additions, then return the number of arrays of each value, and all these arrays."""
    rest = iter(parts)
    for kind, identifier, number, lanes, there, place in additions:
        leaves = [next(rest) if one else None for one in there]
        accept(kind, identifier, Contribution(number, lanes, leaves, place))
    owned = current_worker().references.owned
    found = [arrays_of(owned.value(one).result()) for one in values]
    return [len(arrays) for arrays in found], ArrayBlock([array for arrays in found for array in arrays])
