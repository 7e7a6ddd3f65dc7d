"""Timelines: the recorded events of all workers of a process, in Chrome's trace format; the merge of ranks' files.

Perfetto (ui.perfetto.dev) opens the files. In a trace, a worker is a process. Events that overlap in time are on
separate tracks. An arrow leads from each call to the event that served the call.
"""

import concurrent.futures
import contextlib
import heapq
import itertools
import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jdistgrad import events
from jdistgrad.errors import TimelineError
from jdistgrad.events import BUCKET, CALL, PIECE, PULLBACK, SERVE, Event
from jdistgrad.wire import launcher_env

WAITERS = 8

TraceFile = dict[str, Any]

TRACKS = {CALL: "calls", PIECE: "pieces", BUCKET: "buckets", SERVE: "served", PULLBACK: "served"}
ORDER = tuple(dict.fromkeys(TRACKS.values()))
LANES = 1000  # more than any track has

LATER_PIECE = "#7fa3d4"  # every other piece of a row
LABELLED = 0.02  # the part of the picture's width from which a piece shows its number
COLOURS = {CALL: "#c7ccd6", PIECE: "#3f6fb5", SERVE: "#3d9970", PULLBACK: "#d9822b", BUCKET: "#8e5ea2"}


def timeline(path: str | os.PathLike[str] | None = None) -> "Timeline":
    """Record the events of each worker in a block: calls, served calls, pullbacks, pieces of ``jit``, buckets.

    Records all workers of this process. Under mpirun every rank records itself, and its rank is put into the file's
    name: ``trace.rank2.json``; ``jdistgrad trace`` makes one file of them. ``jdistgrad run --timeline trace.json`` does
    both for an unchanged program. Nothing is measured outside such a block.

    Arguments:
      path: the file to write at the end of the block, for Perfetto (ui.perfetto.dev); default none. A line on the error
        stream says what has been written, and where.

    Returns:
      The timeline, with ``.events``, ``.save(path)`` and ``.plot()``.

    Raises:
      TimelineError: this process is recording a timeline already, or the file cannot be written.

    Example:
      >>> with jd.local_workers(3), jd.timeline() as recorded:
      ...     answer = jd.rpc_sync("worker2", jnp.add, args=(1, 2))
      >>> sorted((event.kind, event.worker) for event in recorded.events)
      [('call', 'worker0'), ('serve', 'worker2')]
    """
    return Timeline(path)


class Timeline:
    """A recording of the workers of this process, which ``timeline`` returns."""

    def __init__(self, path: str | os.PathLike[str] | None):
        self._path = path
        self.events: list[Event] = []
        self._epoch = time.time() - time.monotonic()

    def __enter__(self) -> "Timeline":
        if events.sink is not None:
            raise TimelineError(
                "a timeline is being recorded in this process already, of all its workers: by another block, on any of "
                "them, or by `jdistgrad run --timeline`. Record one at a time."
            )
        if self._path is not None:
            check_writable(in_this_rank(self._path))
        self._waiters = concurrent.futures.ThreadPoolExecutor(WAITERS, "jdistgrad-timeline")
        events.sink = self._record
        return self

    def __exit__(self, *exception: Any) -> None:
        events.sink = None
        self._waiters.shutdown(wait=True)
        if self._path is not None:
            path = in_this_rank(self._path)
            self.save(path)
            print(summary(self.trace(), path), file=sys.stderr)

    def trace(self) -> TraceFile:
        """Return the events recorded so far, in Chrome's trace format."""
        return to_trace(list(self.events), host=socket.gethostname(), epoch=self._epoch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recorded events to a file for Perfetto."""
        write(self.trace(), path)

    def plot(self, axes: Any = None) -> Any:
        """Draw the recorded events with matplotlib, and return the axes."""
        return plot(self.trace(), axes)

    def _record(self, recorded: events.Report) -> None:
        event = events.made(recorded)
        if event.arrays is None:
            self.events.append(event)
        else:
            with contextlib.suppress(RuntimeError):  # the block has ended meanwhile
                self._waiters.submit(self._record_when_ready, event)

    def _record_when_ready(self, event: Event) -> None:
        """Record an event once its arrays are ready: JAX returns earlier, but a piece ends with its results."""
        import jax

        end = event.end
        try:
            jax.block_until_ready(event.arrays)
            end = time.monotonic()
        except RuntimeError:  # an array was donated meanwhile, or its computation failed: its users get that error
            pass
        self.events.append(event._replace(end=end, arrays=None))


def in_this_rank(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path with this rank in its file name if this process is a rank of a job, else the path itself."""
    named = pathlib.Path(path)
    return named.with_suffix(f".rank{launcher_env.rank()}{named.suffix}") if launcher_env.launched() else named


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise TimelineError if the file cannot be written: now, not after the program has run."""
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir():
        raise TimelineError(f"{path} cannot be written: there is no folder {folder}. Make it first.")
    if not os.access(folder, os.W_OK) or pathlib.Path(path).is_dir():
        raise TimelineError(f"{path} cannot be written: it is a folder, or {folder} is not yours to write in.")


def to_trace(events: Iterable[Event], *, host: str, epoch: float) -> TraceFile:
    """Return the trace of one process. ``epoch``: the wall clock when its ``time.monotonic`` was 0."""
    groups: dict[tuple[int, str], list[Event]] = {}
    workers: dict[int, dict[str, None]] = {}  # the names of a rank, one after the other, if there were several worlds
    for event in sorted(events, key=lambda event: event.start):
        groups.setdefault((event.rank, TRACKS[event.kind]), []).append(event)
        workers.setdefault(event.rank, {}).update({event.worker: None} if event.worker else {})

    def named(what: str, rank: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": f"{what}_name", "pid": rank, "tid": tid, "args": {"name": name}}

    entries = [named("process", rank, 0, ", ".join(workers[rank]) or f"rank {rank}") for rank in sorted(workers)]
    for (rank, track), group in groups.items():
        lanes = beside([(event.start, event.end) for event in group])
        base = ORDER.index(track) * LANES
        names = (track if lane == 0 else f"{track} ({lane + 1})" for lane in range(max(lanes) + 1))
        entries += [named("thread", rank, base + lane, name) for lane, name in enumerate(names)]
        for event, lane in zip(group, lanes, strict=True):
            start, duration = event.start * 1e6, max(event.end - event.start, 0) * 1e6
            place, details = {"pid": rank, "tid": base + lane, "ts": start}, dict(event.details)
            entries.append(
                {"ph": "X", "name": event.name, "cat": event.kind, "dur": duration, "args": details, **place}
            )
            if "call" in details:
                ends = {"ph": "s"} if event.kind == CALL else {"ph": "f", "bp": "e"}
                entries.append({**ends, "name": "call", "cat": "call", "id": details["call"], **place})
    clock = {"host": host, "epoch": epoch, "ranks": sorted(workers)}
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"jdistgrad": clock}}


def beside(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return for each span the first lane that is free. The spans must be in the order of their starts."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes, new = [], itertools.count()
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else next(new)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes


def merge(traces: Mapping[str, TraceFile]) -> TraceFile:
    """Merge the traces of several processes (by file name) into one, on one clock that begins at 0.

    Processes of one machine share its monotonic clock. Between machines the wall clocks are trusted.
    """
    epochs: dict[str, float] = {}
    owners: dict[int, str] = {}
    entries: list[dict[str, Any]] = []
    for name, trace in traces.items():
        clock = trace["otherData"]["jdistgrad"]
        for rank in clock["ranks"]:
            if owners.setdefault(rank, name) != name:
                raise TimelineError(
                    f"{owners[rank]} and {name} both have a rank {rank}, so they are of different runs."
                )
        shift = epochs.setdefault(clock["host"], clock["epoch"])
        entries += [
            entry | {"ts": entry["ts"] + shift * 1e6} if "ts" in entry else entry for entry in trace["traceEvents"]
        ]
    first = min((entry["ts"] for entry in entries if "ts" in entry), default=0.0)
    moved = [entry | {"ts": round(entry["ts"] - first, 3)} if "ts" in entry else entry for entry in entries]
    clock = {"host": ", ".join(epochs), "epoch": first / 1e6, "ranks": sorted(owners)}
    return {"traceEvents": moved, "displayTimeUnit": "ms", "otherData": {"jdistgrad": clock}}


def read(path: str | os.PathLike[str]) -> TraceFile:
    """Read a file that ``timeline`` or ``write`` made."""
    try:
        trace = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        _ = trace["otherData"]["jdistgrad"]["ranks"]
    except OSError as error:
        raise TimelineError(f"{os.fspath(path)} cannot be read from {pathlib.Path.cwd()}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError) as error:
        raise TimelineError(
            f"{os.fspath(path)} is not a timeline of jdistgrad. Record one by `jdistgrad run --timeline FILE` or "
            "`with jdistgrad.timeline(FILE)`."
        ) from error
    return trace


def write(trace: TraceFile, path: str | os.PathLike[str]) -> None:
    pathlib.Path(path).write_text(json.dumps(trace), encoding="utf-8")


def summary(trace: TraceFile, path: str | os.PathLike[str]) -> str:
    """Describe a file in one line, and how to open it."""
    count = sum(entry["ph"] == "X" for entry in trace["traceEvents"])
    workers = len(trace["otherData"]["jdistgrad"]["ranks"])
    return f"{path}: {count} events of {workers} workers. Open it at ui.perfetto.dev"


def plot(trace: TraceFile, axes: Any = None) -> Any:
    """Draw a trace with its time in milliseconds, and return the axes."""
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    if not slices:
        raise TimelineError("nothing was recorded: no call, no piece of a jit, no bucket")
    rows = sorted({(entry["pid"], entry["tid"]) for entry in slices})
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise TimelineError("plot() needs matplotlib: pip install matplotlib") from error
        axes = pyplot.subplots(figsize=(9, 1.2 + 0.25 * len(rows)), layout="constrained")[1]
    first, last = min(entry["ts"] for entry in slices), max(entry["ts"] + entry["dur"] for entry in slices)
    for kind, colour in COLOURS.items():
        for row, place in enumerate(rows):
            mine = [one for one in slices if one["cat"] == kind and (one["pid"], one["tid"]) == place]
            spans = [((one["ts"] - first) / 1e3, one["dur"] / 1e3) for one in mine]
            colours = [LATER_PIECE if kind == PIECE and k % 2 else colour for k in range(len(mine))]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours, edgecolors=colours, linewidth=0.5)
            if kind == PIECE:
                # Each piece that is wide enough shows its number in the plan: the last word of its name.
                for one, (start, length) in zip(mine, spans, strict=True):
                    if length > LABELLED * (last - first) / 1e3:
                        text = {"ha": "center", "va": "center", "fontsize": 7, "color": "white", "clip_on": True}
                        axes.text(start + length / 2, row, one["name"].split()[-1], **text)
    named = [entry for entry in trace["traceEvents"] if entry["ph"] == "M"]
    names = {(entry["name"], entry["pid"], entry["tid"]): entry["args"]["name"] for entry in named}
    labels = [f"{names['process_name', rank, 0]} {names['thread_name', rank, tid]}" for rank, tid in rows]
    axes.set_yticks(range(len(rows)), labels, parse_math=False)  # a worker's name may have dollar signs
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    kinds = {entry["cat"] for entry in slices}
    shown = [kind for kind in COLOURS if kind in kinds]
    handles = [axes.broken_barh([], (0, 0), facecolors=COLOURS[kind]) for kind in shown]
    axes.legend(handles, shown, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    return axes
