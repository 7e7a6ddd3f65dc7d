"""Draw the pictures of the first page and the README, into docs/pictures (or the folder that is named).

python docs/programs/pictures.py

Their colours suit light and dark pages: a browser shows those of the page that the picture is in.
"""

import pathlib
import sys

import jax.numpy as jnp

import jdistgrad as jd

DOCS = pathlib.Path(__file__).parents[1]

STYLE = """<style>
text { font: 13px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #24292f; text-anchor: middle; }
.name { font-weight: 600; }
.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
.small { font-size: 11px; fill: #57606a; }
.start { text-anchor: start; }
.end { text-anchor: end; }
.worker { fill: #f3f6fb; stroke: #7f93b2; }
.kept { fill: #fff3d1; stroke: #b58a1b; }
.passes { fill: #1f6fb4; stroke: #fff; }
.returns { fill: #d9480f; stroke: #fff; }
.weights { fill: #2f8132; stroke: #fff; }
.idle { fill: #e8ecf2; }
.on { fill: #fff; font-size: 10px; }
.forward { stroke: #1f6fb4; stroke-width: 1.8; fill: none; marker-end: url(#forward); }
.backward { stroke: #d9480f; stroke-width: 1.8; fill: none; stroke-dasharray: 5 3; marker-end: url(#backward); }
.of-forward { fill: #1f6fb4; }
.of-backward { fill: #d9480f; }
.axis { stroke: #afb8c1; fill: none; }
.line0 { stroke: #1f6fb4; stroke-width: 2; fill: none; }
.line1 { stroke: #d9480f; stroke-width: 2; fill: none; }
.line2 { stroke: #2f8132; stroke-width: 2; fill: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ee; }
.small { fill: #a9b2bf; }
.worker { fill: #2a3140; stroke: #7f93b2; }
.kept { fill: #4a3b12; stroke: #d9ae45; }
.passes { fill: #2f7fc4; stroke: #1e2129; }
.returns { fill: #d9581f; stroke: #1e2129; }
.weights { fill: #3c8f40; stroke: #1e2129; }
.idle { fill: #343b49; }
.on { fill: #fff; }
.forward, .line0 { stroke: #6cb2f0; }
.backward, .line1 { stroke: #ff9166; }
.line2 { stroke: #7bcf7f; }
.of-forward { fill: #6cb2f0; }
.of-backward { fill: #ff9166; }
.axis { stroke: #5b6473; }
}
</style>
<defs>
<marker id="forward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path class="of-forward" d="M0 0L8 4L0 8z"/></marker>
<marker id="backward" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto">
<path class="of-backward" d="M0 0L8 4L0 8z"/></marker>
</defs>
"""


def picture(width, height, *parts):
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}' + "\n".join(parts) + "\n</svg>\n"


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def box(x, y, width, height, kind, rounded=5):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{rounded}" class="{kind}"/>'


def worker(x, y, height, name, *inside):
    """Draw a worker with what it has: pairs of words and the kind of their box, or None."""
    parts = [box(x, y, 120, height, "worker"), text(x + 60, y + 20, name, "name")]
    for row, (words, kind) in enumerate(inside):
        top = y + 32 + 34 * row
        parts += [box(x + 12, top, 96, 26, kind)] if kind else []
        parts += [text(x + 60, top + 17, words, "code")]
    return "\n".join(parts)


def arrow(path, kind):
    return f'<path d="{path}" class="{kind}"/>'


def first():
    """The first program: a function and its parameters on worker1, the loss on worker0."""
    return picture(
        420,
        176,
        worker(10, 10, 140, "worker0", ("loss_fn", None), ("x, y", "kept")),
        worker(290, 10, 140, "worker1", ("predict", None), ("params", "kept"), ("gradient", "kept")),
        arrow("M130 52H286", "forward"),
        text(210, 45, "call with x"),
        arrow("M290 84H134", "forward"),
        text(210, 77, "result"),
        arrow("M130 122H286", "backward"),
        text(210, 115, "derivative"),
        text(210, 168, "params and their gradient stay on worker1", "small"),
    )


def parts():
    """Two functions on two workers; worker0 composes and differentiates them."""
    return picture(
        350,
        190,
        worker(5, 55, 74, "worker0", ("jax.grad", None)),
        worker(225, 5, 74, "worker1", ("air", "kept")),
        worker(225, 110, 74, "worker2", ("sea", "kept")),
        arrow("M125 76C180 70 170 38 221 36", "forward"),
        arrow("M225 52C184 56 186 84 129 87", "backward"),
        arrow("M125 98C186 101 184 132 221 136", "forward"),
        arrow("M225 154C170 152 178 112 129 109", "backward"),
        text(158, 20, "values", "small of-forward"),
        text(158, 182, "cotangents", "small of-backward"),
    )


def data():
    """One model on three workers, each with its own data."""
    columns = []
    for rank in range(3):
        x = 5 + 115 * rank
        columns += [box(x, 5, 105, 106, "worker"), text(x + 52, 25, f"worker{rank}", "name")]
        columns += [box(x + 10, 37, 85, 26, "kept"), text(x + 52, 54, f"data {rank}", "code")]
        columns += [text(x + 52, 90, "w", "code")]
        columns += [arrow(f"M{x + 40} 111V144", "backward"), arrow(f"M{x + 65} 148V115", "forward")]
    average = [box(5, 148, 335, 30, "worker"), text(172, 168, "average of the gradients")]
    return picture(350, 190, *columns, *average)


KINDS = {"F": "passes", "B": "returns", "I": "returns", "W": "weights"}
NAMES = {"F": "forward pass", "B": "backward pass", "I": "input gradient", "W": "weight gradient"}


def timetable(schedule):
    """What each worker does when, by the forecast of a schedule: a box for each microbatch."""
    forecast = jd.pipeline.forecast(schedule)
    scale, high, parts, kinds = 270 / forecast.seconds, 132 // schedule.workers, [], {}
    for rank, (row, times) in enumerate(zip(schedule.actions, forecast.spans, strict=True)):
        top, middle = 14 + high * rank, 14 + high * rank + high / 2 - 2
        parts += [text(5, middle, f"worker{rank}", "start"), box(70, top, 270, high - 12, "idle", 2)]
        for action, (start, end) in zip(row, times, strict=True):
            kind = kinds.setdefault(action.kind.value, KINDS[action.kind.value])
            x, width = 70 + start * scale, (end - start) * scale
            parts += [box(f"{x:.1f}", top, f"{width:.1f}", high - 12, kind, 2)]
            parts += [text(f"{x + width / 2:.1f}", middle, action.microbatch, "on")]
    for place, kind in enumerate(sorted(kinds, key="FBIW".index)):
        x = 5 + place * 345 // len(kinds)
        parts += [box(x, 158, 14, 14, KINDS[kind]), text(x + 20, 169, NAMES[kind], "start small")]
    return picture(350, 190, *parts)


def stages():
    """What each of three workers does when, in the program of the third card."""
    return timetable(jd.pipeline.one_f_one_b(3, 4))


def engines():
    """A notebook that drives three processes."""
    parts = [box(5, 55, 100, 74, "kept"), text(55, 87, "notebook", "name"), text(55, 108, "%%px", "code")]
    for rank in range(3):
        y = 5 + 62 * rank
        parts += [box(235, y, 110, 54, "worker"), text(290, y + 23, f"worker{rank}", "name")]
        parts += [
            text(290, y + 42, "MPI process", "small"),
            arrow(f"M105 92C170 92 170 {y + 27} 231 {y + 27}", "forward"),
        ]
    return picture(350, 190, *parts)


def predict(params, x):
    return jnp.tanh(x @ params)


def graph():
    """The graph of the first program's first step, as ``ctx.graph()`` draws it."""

    with jd.local_workers(2), jd.context() as ctx:
        params = jd.on("worker1", jnp.zeros).keep(3)
        jd.value_and_grad(lambda params, x: jnp.mean(jd.on("worker1", predict)(params, x) ** 2))(params, jnp.eye(3))
        return ctx.graph()._repr_svg_()


def main(folder=DOCS / "pictures"):
    for draw in (first, parts, data, stages, engines, graph):
        (pathlib.Path(folder) / f"{draw.__name__}.svg").write_text(draw())


if __name__ == "__main__":
    main(*sys.argv[1:])
