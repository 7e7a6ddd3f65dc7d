"""Benchmark of what `--survive` costs while no rank dies: calls and data-parallel steps of jobs with it and without.

python benchmarks/surviving.py            # make bench
"""

import statistics

from measure import JOBS, compare, ended, microseconds, milliseconds, options, per_second, row, run_job, section

WHAT = {
    "numpy": ("a call, 4 bytes, NumPy", microseconds, "<= 1.02"),
    "jax": ("a call, 4 bytes, JAX", microseconds, "<= 1.02"),
    "rate": ("calls, 32 in flight, NumPy", per_second, ">= 0.98"),
    "small": ("a step of eight 64x64 matrices", microseconds, "<= 1.02"),
    "wide": ("a step of 4 layers of 1024x1024", milliseconds, "<= 1.02"),
}


PARTS = {
    "call": ("a call, with the search for dead ranks", microseconds),
    "small": ("the small step, with the vote", microseconds),
    "wide": ("the wide step, with the vote", milliseconds),
}


def parts(rounds):
    """Print what the search for dead ranks and the vote cost, switched on and off within one job."""
    jobs = [run_job(str(JOBS / "surviving_parts_jdistgrad.py"), survive=True) for _ in range(rounds)]
    for key, (what, unit) in PARTS.items():
        on, off, ratios = zip(*(job[key] for job in jobs), strict=True)
        row(what, unit(on), f"without {unit(off)}", f"{statistics.median(ratios):.3f}", "<= 1.02")


def whole(rounds):
    """Print what jobs with and without --survive take."""
    found = {survive: {key: [] for key in WHAT} for survive in (False, True)}
    for _ in range(rounds):
        for survive, figures in found.items():
            for key, value in run_job(str(JOBS / "surviving_jdistgrad.py"), survive=survive).items():
                figures[key].append(value)
    for key, (what, unit, target) in WHAT.items():
        compare(what, unit, found[True][key], "without", found[False][key], target)


def main(chosen):
    with section(f"jdistgrad run --survive -n 2, against jobs without; medians of {chosen.rounds} jobs each, in turn"):
        whole(chosen.rounds)
    with section("what makes the difference, switched on and off within one job"):
        parts(chosen.rounds)


if __name__ == "__main__":
    main(options(__doc__))
    ended()
