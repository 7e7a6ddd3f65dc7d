"""Forecast a schedule's times, bubble and recordings, and draw it as SVG.

In pictures a worker is a row, and a microbatch a colour. Forward passes are light, backward passes and their input
halves dark, weight halves striped.
"""

import colorsys
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from jdistgrad.schedules.playing import Inputs, Span, played
from jdistgrad.schedules.schedule import KINDS, Action, Costs, Kind, Schedule

WIDTH, LEFT, TOP, ROW, HEIGHT, BOTTOM = 900.0, 76.0, 64.0, 30.0, 24.0, 34.0  # HEIGHT is that of a box in its ROW
LETTER = 6.4  # width of a letter
TURN = 0.381966  # of the circle of colours from one microbatch to the next: neighbours differ

STYLE = """
.jdistgrad-pipeline text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #222; text-anchor: middle; }
.jdistgrad-pipeline .title { font-size: 12px; font-weight: bold; text-anchor: start; }
.jdistgrad-pipeline .left { text-anchor: start; } .jdistgrad-pipeline .right { text-anchor: end; }
@media (prefers-color-scheme: dark) { .jdistgrad-pipeline { filter: invert(0.88) hue-rotate(180deg); } }
.jdistgrad-pipeline .on-dark { fill: #fff; }
"""
STRIPES = (
    '<defs><pattern id="jdg-stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="5" fill="#fff" fill-opacity="0.6"/></pattern></defs>'
)


def forecast(schedule: Schedule, costs: Costs | None = None, inputs: Inputs | None = None) -> "Forecast":
    """Check a schedule as ``check`` does, and forecast how it will run.

    Arguments:
      schedule: the schedule.
      costs: what actions cost; by default a forward pass 1, and a backward pass 2.
      inputs: as for ``check``.

    Example:
      >>> forecast(one_f_one_b(4, 8)).bubble  # (p - 1) / (m + p - 1)
      0.2727272727272727
    """
    return Forecast(schedule, tuple(map(tuple, played(schedule, inputs, costs or Costs()))))


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """How a schedule will run. Notebooks show it as a picture.

    ``spans`` are the start and the end of each worker's actions, in the order of ``schedule.actions``.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def times(self) -> dict[Action, Span]:
        """The start and the end of every action."""
        rows = zip(self.schedule.actions, self.spans, strict=True)
        return {action: span for row in rows for action, span in zip(*row, strict=True)}

    @property
    def seconds(self) -> float:
        """The time of the step: from the start of the first action to the end of the last."""
        return max(row[-1][1] for row in self.spans if row)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time for which each worker carries out actions."""
        return tuple(sum(end - start for start, end in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The fraction of the step in which workers are idle."""
        whole = self.schedule.workers * self.seconds
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def recordings(self) -> tuple[int, ...]:
        """The most recordings that each worker keeps at once.

        A recording lasts from the start of a forward pass to the end of its backward pass or weight half. Without
        backward passes there are none.
        """
        if not self.schedule.trains:
            return (0,) * self.schedule.workers
        rows = ((KINDS[action.kind].keeps for action in row) for row in self.schedule.actions)
        return tuple(max(itertools.accumulate(row, initial=0)) for row in rows)

    def text(self) -> str:
        """Return a table with a row for each worker."""
        lines = [str(self), f"{'worker':>6}  {'busy':>10}  {'idle':>6}  {'recordings':>10}  stages"]
        for worker, (busy, recordings) in enumerate(zip(self.busy, self.recordings, strict=True)):
            stages = ", ".join(str(k) for k, place in enumerate(self.schedule.placement) if place == worker)
            idle = 1 - busy / self.seconds if self.seconds else 0.0
            lines.append(f"{worker:>6}  {busy:>10.4g}  {idle:>6.1%}  {recordings:>10}  {stages}")
        return "\n".join(lines)

    def svg(self) -> str:
        """Return a picture as SVG: a row for each worker, a colour for each microbatch."""
        return draw(str(self), self.schedule, self.spans, self.seconds)

    _repr_svg_ = svg

    def __str__(self) -> str:
        made = self.schedule
        return (
            f"{made.stages} stages on {made.workers} workers, {made.microbatches} microbatches: "
            f"step {self.seconds:.4g}, bubble {self.bubble:.1%}, recordings {max(self.recordings)}"
        )

    def __repr__(self) -> str:
        return f"<Forecast of {self}>"


def draw(title: str, schedule: Schedule, spans: Sequence[Sequence[Span]], seconds: float) -> str:
    """Return an SVG of the actions of each worker with their starts and ends."""
    height = TOP + ROW * schedule.workers + BOTTOM
    scale = (WIDTH - LEFT - 12) / (seconds or 1)
    size = f'width="{WIDTH:.0f}" height="{height:.0f}" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jdistgrad-pipeline" {size}>',
        f"<style>{STYLE}</style>{STRIPES}",
        f'<rect width="{WIDTH:.0f}" height="{height:.0f}" fill="#fff"/>',
        f'<text class="title" x="10" y="20">{escape(title)}</text>',
        *_legend({action.kind for row in schedule.actions for action in row}),
        f'<text class="left" x="{LEFT}" y="{height - 16}">0</text>',
        f'<text class="right" x="{WIDTH - 12}" y="{height - 16}">{seconds:.4g}</text>',
    ]
    for worker, (row, times) in enumerate(zip(schedule.actions, spans, strict=True)):
        top = TOP + ROW * worker
        parts.append(f'<text class="left" x="10" y="{top + 16:.0f}">worker {worker}</text>')
        parts.append(f'<rect fill="#f1f1f1" x="{LEFT}" y="{top}" width="{seconds * scale:.2f}" height="{HEIGHT}"/>')
        for action, (start, end) in zip(row, times, strict=True):
            x, width = LEFT + start * scale, (end - start) * scale
            parts += _box(action, x, top, width, f"{action}: {start:.6g} to {end:.6g}")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(action: Action, x: float, top: float, width: float, tooltip: str = "") -> Iterator[str]:
    """Yield a box, with as much of the action's name in it as fits."""
    spec = KINDS[action.kind]
    red, green, blue = colorsys.hls_to_rgb((0.58 + action.microbatch * TURN) % 1, spec.lightness, 0.6)
    colour = f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
    place = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{HEIGHT}"'
    yield f'<rect stroke="#fff" stroke-width="0.5" {place} fill="{colour}"><title>{tooltip}</title></rect>'
    if spec.striped:
        yield f'<rect {place} fill="url(#jdg-stripes)" pointer-events="none"/>'
    label = next((one for one in (str(action), str(action.microbatch)) if len(one) * LETTER < width - 1), "")
    if label:
        on = "on-dark" if spec.lightness < 0.5 else "on-light"
        yield f'<text class="{on}" x="{x + width / 2:.2f}" y="{top + 16:.0f}" pointer-events="none">{label}</text>'


def _legend(kinds: set[Kind]) -> Iterator[str]:
    """Yield a box for each kind that occurs, with its name: stage 0, microbatch 0."""
    x = LEFT
    for kind in Kind:
        if kind in kinds:
            yield from _box(Action(kind, 0, 0), x, 32, 30)
            yield f'<text class="left" x="{x + 36}" y="48">{kind.words}</text>'
            x += 36 + LETTER * (len(kind.words) + 4)
    yield f'<text class="right" x="{WIDTH - 12}" y="48">2F0: stage 2, forward, microbatch 0</text>'
