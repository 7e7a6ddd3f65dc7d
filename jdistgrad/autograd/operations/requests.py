"""What a worker has at hand or only puts away: values, and parts of gradients. What is asked at once goes together.

Nobody waits for company: an errand is done as soon as it is heard.
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
from jdistgrad.wire.bare import Bare

Gift = tuple[str, int, Contribution]  # what kind of thing, which one, and what is added to its gradient


@dataclasses.dataclass
class Errand:
    """Something asked of a worker: the arrays of a value it has, or to accept a part of a gradient.

    ``known``: outputs that need no answer; ``finish`` makes the others of the arrays; ``kept`` lives until then.
    """

    to: int
    value: int | None
    gift: Gift | None
    finish: Callable[[list[Any]], list[Any]]
    known: Sequence[Any] = ()
    kept: Any = None


def send(errands: Sequence[Errand]) -> list[Started]:
    """Errands for one worker, in one message."""
    values = list(dict.fromkeys(one.value for one in errands if one.value is not None))
    gifts = [one.gift for one in errands if one.gift is not None]
    parts = Bare([leaf for _, _, part in gifts for leaf in part.leaves if leaf is not None])
    with within(current_scope() if gifts else None):  # to fetch a value is not to take part in a context
        args = (values, [_told(*gift) for gift in gifts], parts)
        future = current_worker().rpc_async(errands[0].to, run_errands, args, {}, None)
    return [Started(future, _Part(one, values), one.known) for one in errands]


def _told(kind: str, identifier: int, part: Contribution) -> tuple[Any, ...]:
    """A gift but for its arrays: the leaves that are there are marked."""
    return kind, identifier, part.number, part.lanes, [leaf is not None for leaf in part.leaves], part.place


@dataclasses.dataclass
class _Part:
    """An errand's part of the answer."""

    errand: Errand
    values: list[int]

    def __call__(self, answer: tuple[list[int], list[Any]]) -> list[Any]:
        if self.errand.value is None:
            return self.errand.finish([])
        counts, arrays = answer
        place = self.values.index(self.errand.value)
        start = sum(counts[:place])
        return self.errand.finish(list(arrays[start : start + counts[place]]))


def run_errands(values: list[int], gifts: list[tuple[Any, ...]], parts: list[Any]) -> tuple[list[int], Bare]:
    """When the gifts have been put away: how many arrays each value has, and all of them."""
    rest = iter(parts)
    for kind, identifier, number, lanes, there, place in gifts:
        leaves = [next(rest) if one else None for one in there]
        accept(kind, identifier, Contribution(number, lanes, leaves, place))
    owned = current_worker().references.owned
    found = [arrays_of(owned.value(one).result()) for one in values]
    return [len(arrays) for arrays in found], Bare([array for arrays in found for array in arrays])
