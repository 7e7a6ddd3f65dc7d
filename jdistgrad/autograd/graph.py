"""The recorded graph of a context: which messages its workers sent each other, where gradients came back, a picture."""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from jdistgrad.autograd.tape.links import Link
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.current import within
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import spell

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


LETTER, PADDING, ARROW = 7.3, 16, 90  # widths: of a letter, of the padding around text, of the gap between lanes
HEIGHT, ROW, TOP = 24, 36, 84  # of a box, from row to row, and above the first row
MARGIN = 44.0  # room for the arrows of a worker's messages to itself
LONGEST = 40  # the longest name shown, in letters
FORWARD, BACKWARD = "#1f6fb4", "#d9480f"
FILLS = {"send": "#e3effa", "recv": "#e8f5e9", "function": "#fff6d6", "value": "#f3e8fd"}

STYLE = f"""
.jdistgrad text {{ font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #222; text-anchor: middle; }}
.jdistgrad .title, .jdistgrad .worker {{ font-weight: bold; }}
.jdistgrad .lane {{ stroke: #bbb; stroke-width: 1.5; }}
.jdistgrad rect {{ stroke: #777; }}
.jdistgrad path {{ stroke-width: 1.6; }}
.jdistgrad .forward {{ stroke: {FORWARD}; fill: none; marker-end: url(#forward); }}
.jdistgrad .backward {{ stroke: {BACKWARD}; fill: none; stroke-dasharray: 5 3; marker-end: url(#backward); }}
"""


@dataclasses.dataclass(frozen=True)
class Box:
    """An event on a worker's lane."""

    rank: int
    row: int
    text: str
    kind: str
    tooltip: str = ""


@dataclasses.dataclass(frozen=True)
class Arrow:
    """The message of a pair, from its send box to its recv box."""

    pair: Pair
    send: Box
    recv: Box


def draw(title: str, workers: Mapping[int, str], pairs: Sequence[Pair]) -> str:
    """Return an SVG of pairs. ``workers`` maps ranks to names."""
    boxes, arrows = placed(pairs)
    lanes = _lanes(workers, boxes)
    width = max(max(x + half for x, half in lanes.values()) + ARROW / 2, 520)
    height = TOP + ROW * (1 + max((box.row for box in boxes), default=0)) + 8
    body = [
        *_head(title, width),
        *(part for rank, name in workers.items() for part in _lane(name, *lanes[rank], height)),
        *(part for arrow in arrows for part in _arrow(arrow, lanes)),
        *(part for box in boxes for part in _box(box, lanes[box.rank][0])),
    ]
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="jdistgrad" {size}>'
    return "\n".join([opening, f"<style>{STYLE}</style>", *_markers(), *body, "</svg>"]) + "\n"


def placed(pairs: Sequence[Pair]) -> tuple[list[Box], list[Arrow]]:
    """Place boxes and arrows in rows. A row belongs to one pair, one function, or one value."""
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    row = 0
    for pair in pairs:
        if pair.kind in (VALUE, GRADIENT):
            boxes.append(Box(pair.source, row, pair.what, "value", pair.what))
            row += 1
        below = row + (pair.source == pair.target)  # a worker's message to itself
        send = Box(pair.source, row, f"send {spell(pair.message)}", "send", pair.what)
        recv = Box(pair.target, below, f"recv {spell(pair.message)}", "recv", pair.what)
        boxes += [send, recv]
        arrows.append(Arrow(pair, send, recv))
        row = below + 1
        if pair.kind is CALL:
            boxes.append(Box(pair.target, row, short(pair.what), "function", pair.what))
            row += 1
    return boxes, arrows


def short(what: str) -> str:
    """Strip modules from names and truncate the text to ``LONGEST`` letters."""
    text = " ".join(word.rsplit(".", 1)[-1] for word in what.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _width(text: str) -> float:
    return LETTER * len(text) + PADDING


def _lanes(workers: Mapping[int, str], boxes: Sequence[Box]) -> dict[int, tuple[float, float]]:
    """Return the centre and the half width of each worker's lane."""
    lanes, left = {}, MARGIN
    for rank, name in workers.items():
        half = max(_width(text) for text in [name, *(box.text for box in boxes if box.rank == rank)]) / 2
        lanes[rank] = left + half, half
        left += 2 * half + ARROW
    return lanes


def _markers() -> Iterator[str]:
    yield "<defs>"
    for name, colour in (("forward", FORWARD), ("backward", BACKWARD)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        )
    yield "</defs>"


def _head(title: str, width: float) -> Iterator[str]:
    yield f'<rect x="0" y="0" width="{width:.0f}" height="100%" style="fill: #fff; stroke: none"/>'
    yield _text(MARGIN + LETTER * len(title) / 2, 24, title, "title")
    for k, (name, label) in enumerate((("forward", "forward"), ("backward", "backward"))):
        x = width - 250 + 120 * k
        yield _line(name, f"M{x} 20H{x + 36}")
        yield _text(x + 74, 24, label, "legend")


def _lane(name: str, x: float, half: float, height: float) -> Iterator[str]:
    yield f'<line class="lane" x1="{x:.1f}" y1="64" x2="{x:.1f}" y2="{height - 8}"/>'
    yield f'<rect x="{x - half:.1f}" y="40" width="{2 * half:.1f}" height="{HEIGHT}" rx="3" style="fill: #eee"/>'
    yield _text(x, 56, name, "worker")


def _box(box: Box, x: float) -> Iterator[str]:
    width, top = _width(box.text), TOP + ROW * box.row
    yield f"<g><title>{escape(box.tooltip)}</title>"
    yield (
        f'<rect x="{x - width / 2:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" '
        f'rx="{12 if box.kind in ("send", "recv") else 4}" style="fill: {FILLS[box.kind]}"/>'
    )
    yield _text(x, top + 16, box.text, box.kind)
    yield "</g>"


def _arrow(arrow: Arrow, lanes: Mapping[int, tuple[float, float]]) -> Iterator[str]:
    """Yield an arrow forward if the pair has a forward message, and an arrow back if a gradient came back."""
    there, back = (_loops if arrow.send.rank == arrow.recv.rank else _straight)(arrow, lanes)
    if arrow.pair.kind is not GRADIENT:
        yield _line("forward", there)
    if arrow.pair.pulled:
        yield _line("backward", back)
    if arrow.pair.pulled > 1:
        x = (lanes[arrow.send.rank][0] + lanes[arrow.recv.rank][0]) / 2
        yield _text(x, TOP + ROW * arrow.recv.row + 30, f"x{arrow.pair.pulled}", "times")


def _straight(arrow: Arrow, lanes: Mapping[int, tuple[float, float]]) -> tuple[str, str]:
    y, right = TOP + ROW * arrow.send.row + HEIGHT / 2, 1 if arrow.recv.rank > arrow.send.rank else -1
    start = lanes[arrow.send.rank][0] + right * _width(arrow.send.text) / 2
    end = lanes[arrow.recv.rank][0] - right * _width(arrow.recv.text) / 2
    return f"M{start:.1f} {y - 5}H{end:.1f}", f"M{end:.1f} {y + 5}H{start:.1f}"


def _loops(arrow: Arrow, lanes: Mapping[int, tuple[float, float]]) -> tuple[str, str]:
    x, first = lanes[arrow.send.rank][0], TOP + ROW * arrow.send.row + HEIGHT / 2
    half, last = _width(arrow.send.text) / 2, first + ROW
    there = f"M{x + half:.1f} {first}C{x + half + 30:.1f} {first} {x + half + 30:.1f} {last} {x + half:.1f} {last}"
    back = f"M{x - half:.1f} {last}C{x - half - 30:.1f} {last} {x - half - 30:.1f} {first} {x - half:.1f} {first}"
    return there, back


def _line(name: str, path: str) -> str:
    return f'<path class="{name}" d="{path}"/>'


def _text(x: float, y: float, text: str, name: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


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
        table = [("message", "forward", "backward", "what"), *map(self._row, self.pairs)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        title = f"context {spell(self.context)}: {len(self.workers)} workers, {len(self.pairs)} messages"
        return "\n".join(line.rstrip() for line in [title, *lines])

    def _row(self, pair: Pair) -> tuple[str, str, str, str]:
        source, target = self.workers[pair.source], self.workers[pair.target]
        forward = "" if pair.kind is GRADIENT else f"{source} -> {target}"
        backward = f"{source} <- {target}{times(pair.pulled)}" if pair.pulled else ""
        return spell(pair.message), "  " * pair.depth + forward, backward, in_words(pair)


def in_words(pair: Pair) -> str:
    """Describe in words what a pair carries."""
    return {CALL: "call of ", RESULT: "result of "}.get(pair.kind, "") + pair.what


def times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


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
    return scope.content(Tape).links.all(), scope.peers()
