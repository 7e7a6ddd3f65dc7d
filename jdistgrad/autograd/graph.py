"""The recorded graph of a context: the messages between its workers, the gradients that came back, and a picture.

Each crossing of the wire is a send on one worker and a recv on another, under one message id: a call has a pair for its
arguments and a pair for its results, and a fetch has one pair. In the backward pass the two roles of a pair swap. There
is no common clock: a pair follows its cause, and the pairs of one worker stand in the order in which it sent them.
"""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from jdistgrad.autograd.tape.tape import Link, Tape
from jdistgrad.rpc.current import within
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import spell

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


@dataclasses.dataclass(frozen=True)
class Graph:
    """The result of ``ctx.graph()``; it outlives the context. ``str`` gives a table, and a notebook shows the picture.

    Example:
      >>> with jd.context() as ctx:
      ...     loss, gradients = jd.value_and_grad(loss_fn)(params)
      ...     print(ctx.graph())
      ...     ctx.graph().save("graph.svg")
    """

    context: int
    workers: Mapping[int, str]  # names by rank
    pairs: tuple[Pair, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, as SVG."""
        pathlib.Path(path).write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return draw(f"context {spell(self.context)}", self.workers, self.pairs)

    def __str__(self) -> str:
        table = [("message", "forward", "backward", "what")]
        for pair in self.pairs:
            source, target = self.workers[pair.source], self.workers[pair.target]
            forward = "" if pair.kind is GRADIENT else f"{source} -> {target}"
            times = f" ({pair.pulled} times)" if pair.pulled > 1 else ""
            backward = f"{source} <- {target}{times}" if pair.pulled else ""
            what = {CALL: "call of ", RESULT: "result of "}.get(pair.kind, "") + pair.what
            table.append((spell(pair.message), "  " * pair.depth + forward, backward, what))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        title = f"context {spell(self.context)}: {len(self.workers)} workers, {len(self.pairs)} messages"
        return "\n".join(line.rstrip() for line in [title, *lines])


def gather(scope: Scope) -> Graph:
    """Gather the graph of a context from this worker and every worker that was called in the context."""
    worker = current_worker()
    found: dict[int, list[Link]] = {}
    wave = {worker.rank}
    with within(None):  # reading a context must not make a worker take part in it
        while wave:
            asked = {rank: worker.rpc_async(rank, part_of, (scope.id,), {}, None) for rank in sorted(wave)}
            parts = {rank: future.result() for rank, future in asked.items()}
            found |= {rank: links for rank, (links, _) in parts.items()}
            wave = {peer for _, peers in parts.values() for peer in peers} - set(found)
    names = {rank: worker.directory.workers[rank].name for rank in sorted(found)}
    return Graph(scope.id, names, tuple(pairs([link for links in found.values() for link in links])))


def part_of(context: int) -> tuple[list[Link], set[int]]:
    """Return this worker's part of a context: the links it sent, and the ranks it called."""
    scope = current_worker().scopes.find(context)
    return scope.content(Tape).all_links(), scope.peers()


def pairs(links: Sequence[Link]) -> list[Pair]:
    """Return the pairs of links, each cause before its effects."""
    pulls = collections.Counter(link.message for link in links if link.backward and link.reference is None)
    gradients: dict[tuple[int | None, int], list[Link]] = {}  # by the reference and the worker that sends them
    for link in dict.fromkeys(links):  # a pullback that ran again counts once
        if link.backward and link.reference is not None:
            gradients.setdefault((link.reference, link.source), []).append(link)
    found = []
    for link, depth in by_cause(link for link in links if not link.backward):
        kind = RESULT if link.answers is not None else CALL if link.reference is None else VALUE
        if kind is VALUE:  # a gradient goes back along the crossing of its value
            waiting = gradients.get((link.reference, link.target), [])
            pulled = len(waiting[:1])
            del waiting[:1]
        else:
            pulled = pulls.get(link.answers if link.answers is not None else link.message, 0)
        found.append(Pair(link.message, link.source, link.target, link.what, kind, depth, pulled))
    rest = [link for waiting in gradients.values() for link in waiting]
    return found + [Pair(one.message, one.target, one.source, one.what, GRADIENT, pulled=1) for one in rest]


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


# The picture, as SVG: workers as lanes, time downwards, sends, recvs and functions as boxes. Solid arrows go forward
# and dashed arrows back, as in the figures of PyTorch's distributed autograd note.

LETTER, PADDING, ARROW = 7.3, 16, 90  # widths: of a letter, of the padding around text, of the gap between lanes
HEIGHT, ROW, TOP = 24, 36, 84  # of a box, from row to row, and above the first row
MARGIN = 44.0  # room for the arrows of a worker's messages to itself
LONGEST = 40  # the longest name shown, in letters
FILLS = {"send": "#e3effa", "recv": "#e8f5e9", "function": "#fff6d6", "value": "#f3e8fd"}

HEAD = """<style>
.jdistgrad text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #222; text-anchor: middle; }
.jdistgrad .title, .jdistgrad .worker { font-weight: bold; }
.jdistgrad .lane { stroke: #bbb; stroke-width: 1.5; }
.jdistgrad rect { stroke: #777; }
.jdistgrad path { stroke-width: 1.6; }
.jdistgrad .forward { stroke: #1f6fb4; fill: none; marker-end: url(#forward); }
.jdistgrad .backward { stroke: #d9480f; fill: none; stroke-dasharray: 5 3; marker-end: url(#backward); }
#forward path { fill: #1f6fb4; } #backward path { fill: #d9480f; }
@media (prefers-color-scheme: dark) { .jdistgrad { filter: invert(0.88) hue-rotate(180deg); } }
</style>
<defs>
<marker id="forward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L8 4L0 8z"/></marker>
<marker id="backward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0L8 4L0 8z"/></marker>
</defs>"""


@dataclasses.dataclass(frozen=True)
class Box:
    rank: int
    row: int
    text: str
    kind: str
    tooltip: str = ""

    @property
    def width(self) -> float:
        return LETTER * len(self.text) + PADDING


Arrow = tuple[Pair, Box, Box]  # the message of a pair, from its send box to its recv box


def draw(title: str, workers: Mapping[int, str], pairs: Sequence[Pair]) -> str:
    boxes, arrows = placed(pairs)
    lanes, left = dict[int, tuple[float, float]](), MARGIN  # the centre and the half width of each
    for rank, name in workers.items():
        half = max(one.width for one in [Box(rank, -1, name, "worker"), *boxes] if one.rank == rank) / 2
        lanes[rank] = left + half, half
        left += 2 * half + ARROW
    width = max(max(x + half for x, half in lanes.values()) + ARROW / 2, 520)
    height = TOP + ROW * (1 + max((box.row for box in boxes), default=0)) + 8
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" class="jdistgrad" {size}>', HEAD]
    parts += [f'<rect x="0" y="0" width="{width:.0f}" height="100%" style="fill: #fff; stroke: none"/>']
    parts += [_text(MARGIN + LETTER * len(title) / 2, 24, title, "title")]
    for x, name in ((width - 250, "forward"), (width - 130, "backward")):
        parts += [f'<path class="{name}" d="M{x} 20H{x + 36}"/>', _text(x + 74, 24, name, "legend")]
    for rank, name in workers.items():
        x, half = lanes[rank]
        parts += [f'<line class="lane" x1="{x:.1f}" y1="64" x2="{x:.1f}" y2="{height - 8}"/>']
        parts += [_rectangle(x, 40, 2 * half, 3, "#eee"), _text(x, 56, name, "worker")]
    for arrow in arrows:
        parts += _arrow(*arrow, lanes)
    for box in boxes:
        x, top, corner = lanes[box.rank][0], TOP + ROW * box.row, 12 if box.kind in ("send", "recv") else 4
        parts += [f"<g><title>{escape(box.tooltip)}</title>", _rectangle(x, top, box.width, corner, FILLS[box.kind])]
        parts += [_text(x, top + 16, box.text, box.kind), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y}">{escape(words)}</text>'


def _rectangle(x: float, y: float, width: float, corner: int, fill: str) -> str:
    place = f'x="{x - width / 2:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}"'
    return f'<rect {place} rx="{corner}" style="fill: {fill}"/>'


def placed(pairs: Sequence[Pair]) -> tuple[list[Box], list[Arrow]]:
    """Place boxes and arrows in rows. A row belongs to one pair, one function, or one value."""
    boxes, arrows, row = list[Box](), list[Arrow](), 0
    for pair in pairs:
        if pair.kind in (VALUE, GRADIENT):
            boxes.append(Box(pair.source, row, pair.what, "value", pair.what))
            row += 1
        below = row + (pair.source == pair.target)  # a worker's message to itself
        send = Box(pair.source, row, f"send {spell(pair.message)}", "send", pair.what)
        recv = Box(pair.target, below, f"recv {spell(pair.message)}", "recv", pair.what)
        boxes += [send, recv]
        arrows.append((pair, send, recv))
        row = below + 1
        if pair.kind is CALL:
            boxes.append(Box(pair.target, row, short(pair.what), "function", pair.what))
            row += 1
    return boxes, arrows


def short(what: str) -> str:
    """Strip modules from names and truncate the text to ``LONGEST`` letters."""
    text = " ".join(word.rsplit(".", 1)[-1] for word in what.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _arrow(pair: Pair, send: Box, recv: Box, lanes: Mapping[int, tuple[float, float]]) -> Iterator[str]:
    """Yield an arrow forward if there is a forward message, and an arrow back if a gradient came back.

    They are straight, or loops beside the lane of one worker.
    """
    x, y, half = lanes[send.rank][0], TOP + ROW * send.row + HEIGHT / 2, send.width / 2
    to = lanes[recv.rank][0]
    if send.rank != recv.rank:
        right = 1 if recv.rank > send.rank else -1
        start, end = x + right * half, to - right * recv.width / 2
        there, back = f"M{start:.1f} {y - 5}H{end:.1f}", f"M{end:.1f} {y + 5}H{start:.1f}"
    else:
        out, last = half + 30, y + ROW
        there = f"M{x + half:.1f} {y}C{x + out:.1f} {y} {x + out:.1f} {last} {x + half:.1f} {last}"
        back = f"M{x - half:.1f} {last}C{x - out:.1f} {last} {x - out:.1f} {y} {x - half:.1f} {y}"
    if pair.kind is not GRADIENT:
        yield f'<path class="forward" d="{there}"/>'
    if pair.pulled:
        yield f'<path class="backward" d="{back}"/>'
    if pair.pulled > 1:
        yield _text((x + to) / 2, TOP + ROW * recv.row + 30, f"x{pair.pulled}", "times")
