"""A picture of a schedule as SVG: a row for each worker, time from left to right, a colour for each microbatch.

Forward passes are light, backward passes and their input halves dark, weight halves striped.
"""

import colorsys
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from jdistgrad.schedules.playing import Span
from jdistgrad.schedules.schedule import Action, Kind, Schedule

WIDTH, LEFT, TOP, ROW, HEIGHT, BOTTOM = 900.0, 76.0, 64.0, 30.0, 24.0, 34.0  # HEIGHT is that of a box in its ROW
LETTER = 6.4  # width of a letter
TURN = 0.381966  # of the circle of colours from one microbatch to the next: neighbours differ
LIGHT, DARK, STRIPED = 0.84, 0.42, 0.66
SHADES = {Kind.FORWARD: LIGHT, Kind.BACKWARD: DARK, Kind.INPUT: DARK, Kind.WEIGHT: STRIPED}

STYLE = """
.jdistgrad-pipeline text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #222; text-anchor: middle; }
.jdistgrad-pipeline .title { font-size: 12px; font-weight: bold; text-anchor: start; }
.jdistgrad-pipeline .left { text-anchor: start; }
.jdistgrad-pipeline .right { text-anchor: end; }
.jdistgrad-pipeline .on-dark { fill: #fff; }
"""
STRIPES = (
    '<defs><pattern id="jdg-stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="5" fill="#fff" fill-opacity="0.6"/></pattern></defs>'
)


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
    place = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{HEIGHT}"'
    yield f'<rect stroke="#fff" stroke-width="0.5" {place} fill="{_colour(action)}"><title>{tooltip}</title></rect>'
    if action.kind is Kind.WEIGHT:
        yield f'<rect {place} fill="url(#jdg-stripes)" pointer-events="none"/>'
    label = next((one for one in (str(action), str(action.microbatch)) if len(one) * LETTER < width - 1), "")
    if label:
        on = "on-dark" if SHADES[action.kind] == DARK else "on-light"
        yield f'<text class="{on}" x="{x + width / 2:.2f}" y="{top + 16:.0f}" pointer-events="none">{label}</text>'


def _colour(action: Action) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.58 + action.microbatch * TURN) % 1, SHADES[action.kind], 0.6)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _legend(kinds: set[Kind]) -> Iterator[str]:
    """Yield a box for each kind that occurs, with its name: stage 0, microbatch 0."""
    x = LEFT
    for kind in Kind:
        if kind in kinds:
            yield from _box(Action(kind, 0, 0), x, 32, 30)
            yield f'<text class="left" x="{x + 36}" y="48">{kind.words}</text>'
            x += 36 + LETTER * (len(kind.words) + 4)
    yield f'<text class="right" x="{WIDTH - 12}" y="48">2F0: stage 2, forward, microbatch 0</text>'
