"""A picture of a timeline, with a row for each track of each worker. Needs matplotlib."""

from collections.abc import Sequence
from typing import Any

from jdistgrad.errors import TimelineError
from jdistgrad.events import BUCKET, CALL, PIECE, PULLBACK, SERVE
from jdistgrad.observe.chrome import TraceFile

LATER_PIECE = "#7fa3d4"  # every other piece of a row
LABELLED = 0.02  # the part of the picture's width from which a piece shows its number
COLOURS = {CALL: "#c7ccd6", PIECE: "#3f6fb5", SERVE: "#3d9970", PULLBACK: "#d9822b", BUCKET: "#8e5ea2"}


def plot(trace: TraceFile, axes: Any = None) -> Any:
    """Draw a trace with its time in milliseconds, and return the axes."""
    slices = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    if not slices:
        raise TimelineError("nothing was recorded: no call, no piece of a jit, no bucket")
    rows = sorted({(entry["pid"], entry["tid"]) for entry in slices})
    axes = new_axes(len(rows)) if axes is None else axes
    first, last = min(entry["ts"] for entry in slices), max(entry["ts"] + entry["dur"] for entry in slices)
    for kind, colour in COLOURS.items():
        for row, place in enumerate(rows):
            mine = [one for one in slices if one["cat"] == kind and (one["pid"], one["tid"]) == place]
            spans = [((one["ts"] - first) / 1e3, one["dur"] / 1e3) for one in mine]
            colours = [LATER_PIECE if kind == PIECE and k % 2 else colour for k in range(len(mine))]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours, edgecolors=colours, linewidth=0.5)
            if kind == PIECE:
                number_pieces(axes, row, [one["name"] for one in mine], spans, (last - first) / 1e3)
    label(axes, [row_name(trace, *place) for place in rows], {entry["cat"] for entry in slices})
    return axes


def number_pieces(
    axes: Any, row: int, names: Sequence[str], spans: Sequence[tuple[float, float]], whole: float
) -> None:
    """Write into each piece that is wide enough its number in the plan: the last word of its name."""
    for name, (start, length) in zip(names, spans, strict=True):
        if length > LABELLED * whole:
            middle = start + length / 2
            axes.text(middle, row, name.split()[-1], ha="center", va="center", fontsize=7, color="white", clip_on=True)


def label(axes: Any, rows: list[str], kinds: set[str]) -> None:
    axes.set_yticks(range(len(rows)), rows, parse_math=False)  # a worker's name may have dollar signs
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    shown = [kind for kind in COLOURS if kind in kinds]
    handles = [axes.broken_barh([], (0, 0), facecolors=COLOURS[kind]) for kind in shown]
    axes.legend(handles, shown, ncols=len(shown), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def row_name(trace: TraceFile, rank: int, tid: int) -> str:
    names = {
        (entry["name"], entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in trace["traceEvents"]
        if entry["ph"] == "M"
    }
    return f"{names['process_name', rank, 0]} {names['thread_name', rank, tid]}"


def new_axes(rows: int) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise TimelineError("plot() needs matplotlib: pip install matplotlib") from error
    return pyplot.subplots(figsize=(9, 1.2 + 0.25 * rows), layout="constrained")[1]
