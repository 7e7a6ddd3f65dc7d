"""Who waits for whom: the graph of waits that the snapshots of a job's processes make together, and its cycles.

Pure functions on what ``rpc.flight.snapshots`` describes. A worker stands in the graph as its world and rank: a process
can have several worlds.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Node = tuple[str, int]  # the world and the rank of a worker

CALL, COLLECTIVE, SHUTDOWN = "call", "collective", "shutdown"


class Wait(NamedTuple):
    """A worker waits for another one: for what, and for how many seconds."""

    waiter: Node
    awaited: Node
    what: str
    seconds: float
    kind: str = CALL


@dataclasses.dataclass(frozen=True)
class Member:
    """A worker: its snapshot, and that of its process."""

    facts: Mapping[str, Any]
    process: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Waits:
    """The waits of a job.

    Attributes:
      names: the workers that are known, also those that gave no snapshot.
      members: the workers that gave one.
    """

    names: Mapping[Node, str]
    members: Mapping[Node, Member]
    edges: Sequence[Wait]


def merge(snapshots: Iterable[Mapping[str, Any]]) -> Waits:
    """Merge the snapshots of a job's processes into one graph."""
    members = {
        (facts["world"], facts["rank"]): Member(facts, process) for process in snapshots for facts in process["workers"]
    }
    names = {
        (world, rank): name for (world, _), member in members.items() for rank, name in enumerate(member.facts["names"])
    }
    edges = [edge for node, member in sorted(members.items()) for edge in _edges(node, member, members)]
    return Waits(dict(sorted(names.items())), members, edges)


def _edges(node: Node, member: Member, members: Mapping[Node, Member]) -> list[Wait]:
    return [*_calls(node, member), *_collectives(node, member, members), *_shutdown(node, member, members)]


def _calls(node: Node, member: Member) -> list[Wait]:
    return [Wait(node, (node[0], one["to"]), describe(one), one["seconds"]) for one in member.facts["calls"]]


def describe(call: Mapping[str, Any]) -> str:
    """Return a call's function, ids, and the call that is being served where it was made."""
    context = f", context {call['context']}" if call["context"] else ""
    within = f", made while serving call {call['serving']}" if call.get("serving") else ""
    return f"{call['function']} (call {call['id']}{context}{within})"


def _collectives(node: Node, member: Member, members: Mapping[Node, Member]) -> list[Wait]:
    """Return whom a worker waits for in collectives: those that are not in the same one, as far as is known."""
    found = []
    for one in member.facts["collectives"]:
        missing = [rank for rank in one["peers"] if present(one, members.get((node[0], rank))) is False]
        found += [Wait(node, (node[0], rank), one["what"], one["seconds"], COLLECTIVE) for rank in missing]
    return found


def present(collective: Mapping[str, Any], member: Member | None) -> bool | None:
    """Return whether a worker is in a collective, or need not be; None if it is not known: it gave no snapshot."""
    if member is None:
        return None
    if collective["spares_shutdown"] and member.facts["shutdown"] is not None:
        return True
    where = collective["group"], collective["turn"]
    return any((one["group"], one["turn"]) == where for one in member.facts["collectives"])


def _shutdown(node: Node, member: Member, members: Mapping[Node, Member]) -> list[Wait]:
    """Return whom a worker waits for in shutdown: those that have not called it, or else those that have calls."""
    seconds = member.facts["shutdown"]
    if seconds is None:
        return []
    others = {other: one.facts for other, one in members.items() if other[0] == node[0] and other != node}
    outside = [other for other, facts in others.items() if facts["shutdown"] is None]
    if outside:
        return [Wait(node, other, "shutdown, which it has not called", seconds, SHUTDOWN) for other in outside]
    busy = [other for other, facts in others.items() if facts["serving"]]
    return [Wait(node, other, "shutdown, as it serves calls", seconds, SHUTDOWN) for other in busy]


def cycles(edges: Iterable[Wait]) -> list[list[Node]]:
    """Return the cycles of a graph: for each worker in one, a shortest through it, from its lowest worker on.

    A worker answers calls in its shutdown too, so whoever waits for an answer does not wait for what ends the shutdown.
    """
    found_edges = list(edges)
    needed = {edge.awaited for edge in found_edges if edge.kind == COLLECTIVE}
    following: dict[Node, set[Node]] = collections.defaultdict(set)
    for edge in found_edges:
        if edge.kind == SHUTDOWN and edge.waiter not in needed:
            continue
        following[edge.waiter].add(edge.awaited)
    found = (_shortest(node, following) for node in sorted(following))
    return [list(cycle) for cycle in dict.fromkeys(_rotated(one) for one in found if one is not None)]


def _shortest(start: Node, following: Mapping[Node, set[Node]]) -> list[Node] | None:
    """Return a shortest cycle through a worker, or None."""
    before: dict[Node, Node] = {}
    queue = collections.deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(following.get(node, ())):
            if other == start:
                return _path(before, start, node)
            if other not in before:
                before[other] = node
                queue.append(other)
    return None


def _path(before: Mapping[Node, Node], start: Node, end: Node) -> list[Node]:
    path = [end]
    while path[-1] != start:
        path.append(before[path[-1]])
    return path[::-1]


def _rotated(cycle: list[Node]) -> tuple[Node, ...]:
    first = cycle.index(min(cycle))
    return (*cycle[first:], *cycle[:first])


def lasting(cycle: Sequence[Node], edges: Sequence[Wait]) -> float:
    """Return for how long all waits of a cycle have been there: the others of its pairs may be older."""
    pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    return min(max(edge.seconds for edge in edges if (edge.waiter, edge.awaited) == pair) for pair in pairs)
