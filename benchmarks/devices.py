"""Benchmark of steps over the devices of two ranks (gloo), against jax.shard_map by hand, MPI, and PyTorch over gloo.

    python benchmarks/devices.py            # make bench

The steps are those of data_parallel.py, on one thread each. By hand, parameters are global arrays that stay global, and
gradients are averaged leaf by leaf or, faster over gloo, as one array.
"""

import statistics

from data_parallel import MODELS, VARIANTS
from measure import compare, ended, milliseconds, options, ratio, row, section, take_turns


def table(found):
    ours, torch = found["jdistgrad"], found.get("torch")
    for key, what in (("small", "MLP 3 x 16x16, batch 64"), *((key, what) for key, (what, _) in MODELS.items())):
        step, flat = ours[f"{key}_devices"], ours[f"{key}_hand_flat"]
        beyond = statistics.median(a - b for a, b in zip(step, flat, strict=True)) * 1e6
        other = f"by hand {milliseconds(flat)}"
        row(f"{what}: over devices", milliseconds(step), other, f"{beyond:+.0f} us", "<= 200 us")
        leaf_by_leaf = ours[f"{key}_hand"]
        row("    leaf by leaf", "", f"by hand {milliseconds(leaf_by_leaf)}", f"{ratio(step, leaf_by_leaf):.2f}", "")
        compare("    in host memory", milliseconds, step, "MPI", ours[f"{key}_mpi"], "")
        if torch and key != "small":
            best = min((torch[f"{key}_{kind}"] for kind in VARIANTS), key=statistics.median)
            compare("    over gloo", milliseconds, step, "torch", best, "<= 0.6")


def main(chosen):
    with section(f"steps over devices, jdistgrad run -n 2; medians of {chosen.rounds} jobs each, in turn"):
        found = take_turns("devices", ["jdistgrad"], chosen.rounds)
        if chosen.torch:
            found |= take_turns("data_parallel", ["torch"], chosen.rounds)
        table(found)


if __name__ == "__main__":
    main(options(__doc__))
    ended()
