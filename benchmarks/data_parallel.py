"""Benchmark of data parallelism on two ranks with one thread each, against PyTorch's DDP over gloo and MPI alone.

    python benchmarks/data_parallel.py            # make bench

PyTorch (2.13) is optional: without PyTorch, its columns stay empty. A step computes a value and its averaged gradients.
The local step is the same without averaging, measured in the same process, in turn.
"""

import statistics

import jax
import numpy as np
from measure import JOBS, compare, ended, median, milliseconds, options, ratio, row, run_job, section, take_turns

from jdistgrad.data_parallel.buckets import limits_of, plan_buckets

MODELS = {
    "deep": ("MLP 64 x 256x256, batch 64", "<= 1.0 x"),
    "wide": ("MLP 4 x 2048x2048, batch 64", "aim 1.0 x"),
    "transformer": ("transformer 4 x 256, 128 tokens, batch 8", "<= 1.0 x"),
}
VARIANTS = ("cap_1", "cap_25", "view")


def table(found):
    ours, torch, mpi = found["jdistgrad"], found.get("torch"), found["mpi"]
    for key, (what, target) in MODELS.items():
        step, local = ours[f"{key}_step"], ours[f"{key}_local"]
        best = torch and min((torch[f"{key}_{kind}"] for kind in VARIANTS), key=statistics.median)
        others = torch and ratio(best, torch[f"{key}_local"])
        told = f"torch's {others:.2f}" if torch else ""
        row(f"{what}: step / local", f"{ratio(step, local):.2f}", told, "", "below torch's")
        compare(f"{what}: a step", milliseconds, step, "torch", best, target)
        compare(f"{what}: local", milliseconds, local, "torch", torch and torch[f"{key}_local"], "")
    for key, what in (("", "as in a step"), ("_anew", "into new arrays")):
        buckets, single = ours[f"buckets{key}"], ours[f"one_by_one{key}"]
        others, faster = f"one by one {milliseconds(single)}", f"{ratio(single, buckets):.1f} x"
        row(f"64-layer MLP's gradients in buckets, {what}", milliseconds(buckets), others, faster, ">= 3 x")
    compare("64 MiB of gradients, one leaf", milliseconds, ours["large_1"], "MPI", mpi["large"], "<= 1.5")
    compare("64 MiB of gradients, 16 leaves", milliseconds, ours["large_16"], "MPI", mpi["large"], "<= 1.5")
    price = statistics.median(a - b for a, b in zip(ours["asked"], ours["unasked"], strict=True))
    told = f"of {statistics.median(ours['asked']) * 1e6:.0f} us"
    row("compiled average of 4 buckets: the meeting", f"{price * 1e6:.0f} us", told, "", "<= 80 us")
    row("100,000 leaves planned", milliseconds([planning()]), "", "", "<= 1 s")
    row("share of communication hidden, 100 ms a bucket", f"{statistics.median(ours['hidden']):.2f}", "", "", ">= 0.8")
    beyond = statistics.median(ours["memory"]) - statistics.median(found["alone"]["memory"])
    row("memory beyond local training, in gradients", f"{beyond:.2f}", "", "", "<= 1")


def sharding(ours):
    """Print steps with sharded optimizer state against steps without, and collectives against MPI's in place."""
    for key, what in (("sharded", "averages in it"), ("sharded_averages", "of averages")):
        compare(
            f"Adam, 64 MiB, sharded state, {what}", milliseconds, ours[key], "without", ours["unsharded"], "<= 1.05"
        )
    for key in ("allreduce", "reduce_scatter"):
        compare(
            f"{key} of 64 MiB into a new array", milliseconds, ours[key], "MPI in place", ours["in_place"], "<= 1.5"
        )


def planning():
    """Return the seconds that a plan of 100,000 leaves takes."""
    leaves = [jax.ShapeDtypeStruct((20, 5 + k % 7), "float32" if k % 3 else "float64") for k in range(100_000)]
    return median(lambda: plan_buckets(leaves, limits_of(None), order=range(99_999, -1, -1)), 5)


def curves():
    """Print the largest relative difference between the losses of all ways to train."""
    jobs = [run_job(str(JOBS / "data_parallel_curves.py"), n=n) for n in (1, 2, 3, 4)]
    losses = np.array([job["losses"] for job in jobs] + [jobs[0]["local"], jobs[0]["mesh"]])
    apart = np.max(np.ptp(losses, axis=0) / losses.min(axis=0))
    what = f"{losses.shape[1]} losses, 1 to 4 ranks, mesh, local: apart by"
    row(what, f"{apart:.0e}", "", "", "rounding")


def main(chosen):
    names = ["jdistgrad", "alone", "mpi", *(["torch"] if chosen.torch else [])]
    with section(f"data parallelism, jdistgrad run -n 2; medians of {chosen.rounds} jobs each, in turn"):
        table(take_turns("data_parallel", names, chosen.rounds))
    with section(f"optimizers that average or share their state; medians of {chosen.rounds} jobs"):
        sharding(take_turns("sharding", ["jdistgrad"], chosen.rounds)["jdistgrad"])
    with section("the example of data-parallel training, on 1 to 4 ranks, on a mesh and in a local world"):
        curves()


if __name__ == "__main__":
    main(options(__doc__))
    ended()
