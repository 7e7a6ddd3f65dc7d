"""Benchmark of pipelines: plans, the time of an action, stages that sleep; against torch.distributed.pipelining.

    python benchmarks/pipelines.py            # make bench

PyTorch (2.13) is optional: without PyTorch, its columns stay empty.
"""

import statistics

from measure import (
    JOBS,
    compare,
    ended,
    microseconds,
    milliseconds,
    options,
    row,
    run_job,
    seconds,
    section,
    take_turns,
)

from jdistgrad import pipeline as pp

JOB = str(JOBS / "pipelines_jdistgrad.py")


def plans():
    """Time what is computed before a step of 16 workers x 128 microbatches."""
    makes = {
        "GPipe": lambda: pp.gpipe(16, 128),
        "1F1B": lambda: pp.one_f_one_b(16, 128),
        "interleaved, 2 chunks": lambda: pp.interleaved(16, 128, 2),
        "zero bubble": lambda: pp.zero_bubble(16, 128),
        "zero bubble in a V": lambda: pp.zbv(16, 128),
    }
    for name, make in makes.items():

        def plan(make=make):
            schedule = make()
            pp.check(schedule)
            pp.forecast(schedule, pp.Costs())

        found = statistics.median(seconds(plan) for _ in range(7))
        row(f"plan, check, forecast: {name}, 16 x 128", milliseconds([found]), "", "", "<= 50 ms")


def halves(rounds):
    """Print the time of a backward pass in two halves, and of the same as one compiled function."""
    jobs = [run_job(str(JOBS / "halves_jdistgrad.py"), n=1) for _ in range(rounds)]
    for width, rows in ((256, 64), (512, 256)):
        one, two = (statistics.median(job[f"{which}_{width}_{rows}"] for job in jobs) for which in ("one", "two"))
        ratio = statistics.median(job[f"two_{width}_{rows}"] / job[f"one_{width}_{rows}"] for job in jobs)
        what = f"backward pass in two halves, 4 layers {width} wide, {rows} rows"
        row(what, milliseconds([two]), f"as one {milliseconds([one])}", f"{ratio:.2f}", "<= 1.1 x")


def table(found):
    ours, torch = found["jdistgrad"], found.get("torch", {})
    compare(
        "an action of 1F1B, 4 KiB between 2 stages",
        microseconds,
        ours["own_4k"],
        "torch",
        torch.get("own_4k"),
        "<= 0.25 x",
    )
    compare("the same, 1 MiB", microseconds, ours["own_1m"], "torch", torch.get("own_1m"), "<= 0.25 x")
    for name, what, target in (
        ("one_f_one_b", "1F1B, sleeping 5 ms forward, 10 ms backward", "<= 138 ms"),
        ("interleaved", "interleaved, the same in 2 chunks", "<= 130 ms"),
        ("zero_bubble", "zero bubble, the same", "125 ms"),
    ):
        figure = f"sleeping_{name}_2"
        compare(f"2 ranks, m = 8: {what}", milliseconds, ours[figure], "torch", torch.get(figure), target)


def compiled(rounds):
    """Print what an action costs in a program that ``jax.jit`` compiles as a whole."""
    jobs = [run_job(str(JOBS / "compiled_pipeline_jdistgrad.py")) for _ in range(rounds)]
    for name, size, target in (("own_4k", "4 KiB", "<= 80 us"), ("own_1m", "1 MiB", "<= 150 us")):
        for ending, how in (("", "ranks meet"), ("_unchecked", "without meeting")):
            what = f"an action inside one compiled program, {size}, {how}"
            row(what, microseconds([job[f"{name}{ending}"] for job in jobs]), "", "", target)


def more_ranks(rounds):
    for size in (4, 8):
        jobs = [run_job(JOB, n=size) for _ in range(rounds)]
        for name, make in (("one_f_one_b", pp.one_f_one_b), ("zero_bubble", pp.zero_bubble)):
            ideal = pp.forecast(make(size, 16), pp.Costs(0.005, None, 0.005, 0.005)).seconds
            found = statistics.median(job[f"sleeping_{name}_{size}"] for job in jobs)
            what, ratio = f"{size} ranks, m = 16, sleeping: {name}", f"{found / ideal:.3f}"
            row(what, milliseconds([found]), f"forecast {1e3 * ideal:.0f} ms", ratio, "<= 1.03 x")


def computing(rounds):
    """Print how much longer steps of stages that compute take than the work of one rank without any waiting."""
    jobs = [run_job(str(JOBS / "stages_jdistgrad.py")) for _ in range(rounds)]
    for name, target in (("one_f_one_b", "1.125"), ("interleaved", "1.063"), ("zero_bubble", "1.042")):
        step, alone = (statistics.median(job[figure] for job in jobs) for figure in (name, f"{name}_alone"))
        ratio = statistics.median(job[name] / job[f"{name}_alone"] for job in jobs)
        what = f"2 ranks, m = 8, stages that compute: {name}"
        row(what, milliseconds([step]), f"alone {milliseconds([alone])}", f"{ratio:.3f}", f"{target} + 0.03")


def two_shards(found):
    ours, torch = found["jdistgrad"], found.get("torch", {})
    for figure, steps in ours.items():
        what = f"PyTorch's pipeline example, {figure.replace('_', ' ')}"
        compare(what, milliseconds, steps, "torch", torch.get(figure), "<= 0.5 x")


def main(chosen):
    names = ["jdistgrad", *(["torch"] if chosen.torch else [])]
    with section("plans of pipelines, one process"):
        plans()
        halves(chosen.rounds)
    with section(f"pipelines, jdistgrad run -n 2; medians of {chosen.rounds} jobs each, in turn"):
        table(take_turns("pipelines", names, chosen.rounds))
    with section(f"pipelines as one compiled program, jdistgrad run -n 2; medians of {chosen.rounds} jobs"):
        compiled(chosen.rounds)
    with section("a network in two shards and a master, 3 ranks"):
        two_shards(take_turns("two_shards", names, chosen.rounds, n=3))
    with section(f"stages that compute; medians of {chosen.rounds} jobs"):
        computing(chosen.rounds)
    with section(f"pipelines of more ranks than cores; medians of {chosen.rounds} jobs"):
        more_ranks(chosen.rounds)


if __name__ == "__main__":
    main(options(__doc__))
    ended()
