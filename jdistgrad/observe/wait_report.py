"""The report of ``jdistgrad stacks``, as text: each rank, who waits for whom, cycles, ranks that did not answer."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdistgrad.observe import waits
from jdistgrad.observe.waits import Node, Waits
from jdistgrad.rpc import places

THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
SHOWN = 10  # calls of one worker


@dataclasses.dataclass(frozen=True)
class Silent:
    """A process that gave no new snapshot.

    Attributes:
      why: that it has ended, is elsewhere or did not answer.
      stacks: what faulthandler wrote in it, if anything.
    """

    label: str
    process: Mapping[str, Any]
    why: str
    stacks: str = ""


def render(
    title: str,
    snapshots: Sequence[Mapping[str, Any]],
    silent: Sequence[Silent],
    events: int = 0,
    earlier: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the report of a job.

    Arguments:
      events: how many of its last events to print for each process.
      earlier: snapshots that are not of now. They make up the graph where there are no others: of a job that has ended.
    """
    found = waits.merge(snapshots or earlier)
    blocks = [title]
    blocks += [_process(one, found, events) for one in [*snapshots, *earlier]]
    blocks += [_silent(one) for one in silent]
    blocks += _unheard(found, [*snapshots, *earlier, *(one.process for one in silent)])
    head = "who waits for whom:" if snapshots or not earlier else "who waited for whom:"
    blocks += ["\n".join([head, *_edges(found)])]
    return "\n\n".join(blocks) + "\n"


def _unheard(found: Waits, processes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the workers whose processes have written nothing, not even that they are there."""
    ranks = {one["rank"] for one in processes}
    names = [name for (_, rank), name in found.names.items() if rank not in ranks]
    if not names or None in ranks:  # a process without a rank has all workers of its world
        return []
    return [
        f"nothing in this folder is of {', '.join(dict.fromkeys(names))}. If they run on other machines, run this "
        "there, or give the job a JDISTGRAD_DEBUG_DIR that all its machines share"
    ]


def _process(process: Mapping[str, Any], found: Waits, events: int) -> str:
    lines = [f"{process['label']}, process {process['pid']} on {process['host']}, {process['cause']}"]
    for facts in process["workers"]:
        lines += _worker(facts, process, found)
    if not process["workers"]:
        lines += ["  in no world: init has not returned, or shutdown has"]
        lines += [f"    {one['name']}: at {one['place']}" for one in process["threads"] if one["place"]]
    lines += [f"  {_event(one)}" for one in process["events"][len(process["events"]) - events :]] if events else []
    return "\n".join(lines)


def _worker(facts: Mapping[str, Any], process: Mapping[str, Any], found: Waits) -> list[str]:
    threads = {one["id"]: one for one in process["threads"]}
    at = threads.get(facts["home"], {}).get("place")
    lines = [f"  {facts['names'][facts['rank']]} (rank {facts['rank']})" + (f" at {at}" if at else "")]
    lines += [f"    its world is broken: {facts['failure']}"] if facts["failure"] else []
    for source, count in facts["refused"].items():
        lines.append(f"    messages from {facts['names'][int(source)]} refused or too late: {count}")
    if facts["shutdown"] is not None:
        lines.append(f"    in shutdown for {facts['shutdown']:.1f} s")
    lines += _limited([_pending(one, facts) for one in facts["calls"]])
    lines += [_collective(one, facts, found) for one in facts["collectives"]]
    return lines + _limited([_served(one, facts, threads) for one in facts["serving"]])


def _limited(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"    and {more} more such"]


def _pending(call: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    peer = facts["names"][call["to"]]
    return f"    waits {call['seconds']:.1f} s for {peer}: {waits.describe(call)}"


def _collective(one: Mapping[str, Any], facts: Mapping[str, Any], found: Waits) -> str:
    states = {rank: waits.present(one, found.members.get((facts["world"], rank))) for rank in one["peers"]}
    missing, unknown = (
        ", ".join(facts["names"][rank] for rank in states if states[rank] is state) for state in (False, None)
    )
    who = f", without {missing}" if missing else "" if unknown else ", with all others"
    inside = ", inside MPI" if one["inside_mpi"] else ""
    doubt = f"; not known whether with {unknown}" if unknown else ""
    number = "" if one["turn"] == one["what"] else f" (number {one['turn']})"
    return f"    in a collective for {one['seconds']:.1f} s: {one['what']}{number}{who}{inside}{doubt}"


def _served(call: Mapping[str, Any], facts: Mapping[str, Any], threads: Mapping[int, Mapping[str, Any]]) -> str:
    place = threads.get(call["thread"], {}).get("place")
    where = f", at {place}" if place else "" if call["thread"] else ", whose future is not done"
    caller = facts["names"][call["caller"]]
    return f"    serves {caller} for {call['seconds']:.1f} s: {waits.describe(call)}{where}"


def _edges(found: Waits) -> Iterable[str]:
    for edge in found.edges:
        yield f"  {_arrow([edge.waiter, edge.awaited], found)}: {edge.what}, {edge.seconds:.1f} s"
    if not found.edges:
        yield "  nobody waits"
    for cycle in waits.cycles(found.edges):
        whole = _arrow([*cycle, cycle[0]], found)
        yield f"cycle: {whole} (for {waits.lasting(cycle, found.edges):.1f} s)"


def _arrow(nodes: Iterable[Node], found: Waits) -> str:
    return " -> ".join(found.names[node] for node in nodes)


def _event(event: Mapping[str, Any]) -> str:
    details = "".join(f", {name} {value}" for name, value in event["details"].items())
    return f"{event['ago']:.3f} s ago: {event['worker']} {event['kind']} {event['name']}{details}"


def _silent(one: Silent) -> str:
    lines = [f"{one.label}, process {one.process['pid']} on {one.process['host']}: {one.why}"]
    lines += [f"  a thread at {place}" for place in places_in(one.stacks)]
    lines += [f"  {line}" for line in one.stacks.strip().splitlines()]
    return "\n".join(lines)


def places_in(stacks: str) -> list[str]:
    """Return the innermost line of the user's program in each thread's stack, as faulthandler writes them."""
    found = []
    for stack in THREAD.split(stacks):
        frames = [frame for frame in FRAME.finditer(stack) if not places.is_installed(frame["file"])]
        found += [places.place(frames[0]["file"], int(frames[0]["line"]), frames[0]["name"])] if frames else []
    return found
