"""Pairs of a send and a recv, made from what each worker has noted of its own sends. Pure functions.

Each crossing of the wire is a send on one worker and a recv on another, under one message id: a call has a pair for its
arguments and a pair for its results, and a fetch has one pair. In the backward pass the two roles of a pair swap. There
is no common clock: a pair follows its cause, and the pairs of one worker stand in the order in which it sent them.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jdistgrad.autograd.tape.links import Link

GradientsByReference = dict[tuple[int | None, int], list[Link]]

CALL, RESULT, VALUE, GRADIENT = "call", "result", "value", "gradient"


@dataclasses.dataclass(frozen=True)
class Pair:
    """A crossing: sent by ``source``, received by ``target``. ``pulled``: how often a gradient came back along it.

    ``kind``: a call's arguments, its result, a reference's value, or the gradient of such a value (it only goes back:
    from ``target`` to ``source``). ``depth``: the number of nested calls in which the pair was sent.
    """

    message: int
    source: int
    target: int
    what: str
    kind: str
    depth: int = 0
    pulled: int = 0


def pairs(links: Sequence[Link]) -> list[Pair]:
    """Make pairs of links; a cause stands before its effects."""
    forward = [link for link in links if not link.backward]
    pulls = collections.Counter(link.message for link in links if link.backward and link.reference is None)
    gradients = _by_reference(link for link in links if link.backward and link.reference is not None)
    ordered = [_paired(link, depth, pulls, gradients) for link, depth in by_cause(forward)]
    rest = [link for waiting in gradients.values() for link in waiting]
    return ordered + [Pair(one.message, one.target, one.source, one.what, GRADIENT, pulled=1) for one in rest]


def _by_reference(links: Iterable[Link]) -> GradientsByReference:
    """Group gradients by their reference and the worker that sends them. A pullback that ran again counts once."""
    found: GradientsByReference = {}
    for link in dict.fromkeys(links):
        found.setdefault((link.reference, link.source), []).append(link)
    return found


def _paired(link: Link, depth: int, pulls: Mapping[int, int], gradients: GradientsByReference) -> Pair:
    kind = RESULT if link.answers is not None else CALL if link.reference is None else VALUE
    if kind is VALUE:  # a gradient goes back along the crossing of its value
        waiting = gradients.get((link.reference, link.target), [])
        pulled = len(waiting[:1])
        del waiting[:1]
    else:
        pulled = pulls.get(link.answers if link.answers is not None else link.message, 0)
    return Pair(link.message, link.source, link.target, link.what, kind, depth, pulled)


def by_cause(links: Iterable[Link]) -> Iterator[tuple[Link, int]]:
    """Yield links in the order of their causes, each with the number of calls around it."""
    caused: dict[int | None, list[Link]] = {}
    for link in links:
        caused.setdefault(link.caused_by, []).append(link)
    known = {link.message for group in caused.values() for link in group}
    first = [link for cause in caused if cause not in known for link in caused[cause]]
    stack = [(link, 0) for link in reversed(first)]
    while stack:
        link, depth = stack.pop()
        yield link, depth
        inside = caused.get(link.message, []) if link.answers is None else []
        stack += [(one, depth + (one.answers is None)) for one in reversed(inside)]
