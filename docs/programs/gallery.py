"""Run the examples and draw what they found, into docs/gallery.

python docs/programs/gallery.py                 # all of them, each in a process of its own: some minutes
python docs/programs/gallery.py training        # one
"""

import importlib
import pathlib
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from pictures import box, picture, text, timetable

import jdistgrad as jd

DOCS = pathlib.Path(__file__).parents[1]
LEFT, TOP, RIGHT, BOTTOM = 60, 30, 335, 155  # of the axes


def chart(label, *lines, x=None, across="step", log=False):
    """Draw lines over their index, or over x; several lines have different colours."""
    heights = [np.log10(line) if log else np.asarray(line, float) for line in lines]
    low, high = min(map(np.min, heights)), max(map(np.max, heights))
    places = [np.arange(len(line)) for line in lines] if x is None else x
    first, last = min(map(np.min, places)), max(map(np.max, places))
    parts = [
        f'<path class="axis" d="M{LEFT} {TOP - 8}V{BOTTOM + 8}H{RIGHT}"/>',
        text(5, 16, f"{label}, logarithmic" if log else label, "start small"),
    ]
    for height, y in ((high, TOP + 4), (low, BOTTOM + 4)):
        parts.append(text(LEFT - 6, y, f"{10**height if log else height:.3g}", "end small"))
    for place, at in ((first, LEFT), (last, RIGHT)):
        parts.append(text(at, BOTTOM + 24, f"{place:g}", "small"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 24, across, "small"))
    for number, (where, height) in enumerate(zip(places, heights, strict=True)):
        across_ = LEFT + (where - first) / (last - first) * (RIGHT - LEFT)
        up = BOTTOM - (height - low) / (high - low) * (BOTTOM - TOP)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across_, up, strict=True))
        parts.append(f'<polyline class="line{number % 3}" points="{points}"/>')
    return picture(350, 190, *parts)


def example(name):
    sys.path.insert(0, str(DOCS.parent / "examples"))
    return importlib.import_module(name)


def run(name, workers=3):
    """Return what main returned on each worker."""
    return jd.spawn(example(name).main, workers)


def coupled_simulation():
    return chart("misfit", run("coupled_simulation")[0][1], log=True)


def data_parallel():
    return chart("loss, the same on three ranks", run("data_parallel")[0])


def data_parallel_mesh():
    jax.config.update("jax_num_cpu_devices", 8)
    return chart("loss on a mesh of eight devices", example("data_parallel_mesh").train())


def distributed_autograd():
    program = example("distributed_autograd")
    t1, t2, t4 = (jax.random.uniform(jax.random.key(seed), (3, 3)) for seed in range(3))
    with jd.local_workers(2), jd.context() as ctx:
        jd.backward(ctx, lambda t1, t2: program.loss_fn(t1, t2, t4, 1), jd.RRef(t1), jd.RRef(t2))
        return ctx.graph()._repr_svg_()


def end_to_end():
    return chart("loss of each of two workers", *(found[0][0] for found in run("end_to_end", 2)))


def exchange():
    program, rounds = example("exchange"), [1, 2, 4, 8, 16, 32, 64, 128]
    with jd.local_workers(3):
        blocks = [jd.on(rank, program.make_block).keep(rank) for rank in range(3)]
        exact = jnp.linalg.svd(jnp.concatenate(jd.get(blocks)), compute_uv=False)[0]
        wrong = []
        for program.ROUNDS in rounds:
            wrong.append(float(abs(program.largest_singular_value(blocks) - exact) / exact))
    return chart("relative error", wrong, x=[np.array(rounds)], across="rounds", log=True)


def heat():
    gradient, _ = run("heat")[0]
    ranks = np.split(np.arange(len(gradient)), 3)
    return chart("gradient, by rank", *(gradient[mine] for mine in ranks), x=ranks, across="point of the rod")


def language_model():
    return chart("loss", run("language_model")[0][0])


def parameter_server():
    return chart("loss of three trainers, in order of arrival", run("parameter_server", 4)[0][0])


def cells(values, x, label):
    """Draw the cells of a plate that is cut in the middle, the more opaque the larger their values are."""
    levels = {}
    for (column, row), share in np.ndenumerate(values / np.abs(values).max()):
        square = f"M{x + 8 * column} {120 - 8 * row}h8v8h-8z"
        levels.setdefault((share > 0, abs(round(20 * float(share)))), []).append(square)
    shown = [
        f'<path class="{"returns" if above else "passes"}" style="stroke: none" fill-opacity="{level / 20}" '
        f'd="{"".join(squares)}"/>'
        for (above, level), squares in sorted(levels.items())
    ]
    words = [text(x + 40, 148, "left: JAX", "small"), text(x + 120, 148, "right: NumPy", "small")]
    frame = f'<path class="axis" d="M{x + 80} 42V134M{x} 48H{x + 160}V128H{x}z"/>'
    return "\n".join([*shown, frame, text(x + 80, 30, label), *words])


def partitioned_heat():
    jax.config.update("jax_enable_x64", True)
    program = example("partitioned_heat")

    def main():
        me, found = jd.init(["driver", "left", "right"]), None
        if me.name == "driver":
            params = {"alpha": 3.0, "beta": 1.2, "conductivity": jnp.ones(2 * program.N**2)}
            with jd.context():
                gradient = jax.grad(program.misfit, 1)(program.coupled, params)["conductivity"]
            found = (
                program.simulate(program.coupled, params)[0].reshape(program.X.shape),
                gradient.reshape(-1, program.N),
            )
        jd.shutdown()
        return found

    temperatures, gradient = map(np.asarray, jd.spawn(main, 3)[0])
    return picture(
        350,
        160,
        cells(temperatures[1:, 1:] - temperatures.min(), 10, "temperature"),
        cells(gradient, 180, "gradient by conductivity"),
    )


def pipeline():
    return timetable(example("pipeline").SCHEDULES["zero bubble"])


def pipeline_compiled():
    return chart("loss", run("pipeline_compiled")[-1][0])


def pipeline_two_shards():
    program = example("pipeline_two_shards")
    program.BATCHES, program.SPLITS = 20, (4,)
    return chart("loss", run("pipeline_two_shards")[0][4][1])


def reinforcement():
    return chart("moves for which the pole stands", run("reinforcement")[0], across="round")


def remote_embedding():
    return chart("mean loss of two trainers", run("remote_embedding")[0][0])


def resuming():
    program = example("resuming")
    with tempfile.TemporaryDirectory() as folder:
        found = jd.spawn(lambda: program.main(folder), 3)
    return chart("loss on each of three ranks", *(losses for losses, _ in found))


def training():
    return chart("loss", run("training")[0][0])


def uneven_inputs():
    parts = [text(5, 16, "batches of each rank", "start small")]
    for rank in range(3):
        top, count = 30 + 48 * rank, len(list(example("uneven_inputs").batches(rank)))
        parts += [text(5, top + 21, f"rank {rank}", "start"), box(60, top, 275, 32, "idle")]
        parts += [box(60 + 13.75 * number, top, 13, 32, "passes") for number in range(count)]
    parts.append(text(197, 184, "step", "small"))
    return picture(350, 190, *parts)


def main(*names):
    if len(names) == 1:
        (DOCS / "gallery" / f"{names[0]}.svg").write_text(globals()[names[0]]())
        return
    for name in names or sorted(path.stem for path in (DOCS.parent / "examples").glob("*.py")):
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
