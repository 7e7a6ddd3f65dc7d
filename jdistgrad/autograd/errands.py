"""What a worker has at hand or only puts away: values, and parts of gradients. What is asked at once goes together.

Nobody waits for company: an errand is done as soon as it is heard.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.autograd.exchange import accept
from jdistgrad.autograd.layout import is_array, split
from jdistgrad.autograd.ledger import Contribution
from jdistgrad.autograd.operations import Started
from jdistgrad.rpc.current import current_scope, current_worker, within
from jdistgrad.wire.bare import Bare

Gift = tuple[str, int, Contribution]  # what kind of thing, which one, and what is added to its gradient


@dataclasses.dataclass
class Errand:
    """Something asked of a worker: the arrays of a value it has, or to accept a part of a gradient.

    ``known``: outputs that need no answer; ``finish`` makes the others of the arrays.
    """

    to: int
    value: int | None
    gift: Gift | None
    finish: Callable[[list[Any]], list[Any]]
    known: Sequence[Any] = ()


def send(errands: Sequence[Errand]) -> list[Started]:
    """Errands for one worker, in one message."""
    values = [one.value for one in errands if one.value is not None]
    gifts = [one.gift for one in errands if one.gift is not None]
    with within(current_scope() if gifts else None):  # to fetch a value is not to take part in a context
        future = current_worker().rpc_async(errands[0].to, run_errands, (values, gifts), {}, None)
    return [Started(future, _Part(one, values), one.known) for one in errands]


@dataclasses.dataclass
class _Part:
    """An errand's part of the answer."""

    errand: Errand
    values: list[int]

    def __call__(self, answer: list[list[Any]]) -> list[Any]:
        value = self.errand.value
        return self.errand.finish([] if value is None else list(answer[self.values.index(value)]))


def run_errands(values: list[int], gifts: list[Gift]) -> list[Bare]:
    """The arrays of each value; when the gifts have been put away."""
    for kind, identifier, contribution in gifts:
        accept(kind, identifier, contribution)
    owned = current_worker().owned
    return [Bare(split(owned.value(one).result(), is_array)[1]) for one in values]
