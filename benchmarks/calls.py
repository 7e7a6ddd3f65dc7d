"""Calls between two processes: against PyTorch's RPC, and against MPI itself.

    python benchmarks/calls.py            # make bench

PyTorch (2.13) is optional: without it its columns stay empty.
"""

import argparse
import importlib.util
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from measure import ratio, row, run_job

JOBS = pathlib.Path(__file__).parent / "jobs"
BOUND = ["--allow-run-as-root"] if os.geteuid() == 0 else []

Runs = Mapping[str, Sequence[float]]


def take_turns(names: Sequence[str], rounds: int, flags: list[str] | None) -> dict[str, dict[str, list[float]]]:
    """Run each job in turn, again and again; each figure of each job, round by round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for k in range(rounds):
        os.environ["JDISTGRAD_BENCH"] = "--long" if k == 0 and flags is None else ""
        for name in names:
            for figure, value in run_job(str(JOBS / f"calls_{name}.py"), flags=flags).items():
                found[name].setdefault(figure, []).append(value)
    return found


def microseconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e6:.0f} us"


def milliseconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms"


def per_second(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} /s"


def compare(what, unit, ours, name, others, target):
    if others is None:
        row(what, unit(ours), "", "", target)
    else:
        row(what, unit(ours), f"{name} {unit(others)}", f"{ratio(ours, others):.2f}", target)


def table(found):
    ours, mpi, torch = found["jdistgrad"], found["mpi"], found.get("torch", {})
    for kind in ("numpy", "jax"):
        array = {"numpy": "NumPy array", "jax": "JAX array"}[kind]
        what = f"round trip of a Python function, 4 B {array}"
        compare(what, microseconds, ours[f"small_{kind}"], "torch", torch.get("small"), "<= 0.25 x")
        what = f"32 calls in flight, 4 B {array}"
        compare(what, per_second, ours[f"rate_{kind}"], "torch", torch.get("rate"), ">= 4 x")
    compare("round trip, 64 MiB", milliseconds, ours["large"], "torch", torch.get("large"), "<= 0.8 x")
    compare("round trip, 64 MiB", milliseconds, ours["large"], "Sendrecv", mpi["exchange"], "<= 1.5 x")
    compare("round trip, 64 MiB", milliseconds, ours["large"], "Send, Recv", mpi["there_and_back"], "")
    if "idle" in ours:
        row("CPU of an idle worker", f"{100 * ours['idle'][0]:.1f} %", "", "", "<= 5 % of a core")
        row("memory over 100,000 calls and references", f"{ours['growth'][0]:+.1f} MiB", "", "", "flat")
        row("values still owned after them", f"{ours['owned'][0]:.0f}", "", "", "0")


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--ours-only", action="store_true")
    chosen = options.parse_args()
    names = ["jdistgrad", "mpi"]
    if not chosen.ours_only and importlib.util.find_spec("torch"):
        names.insert(1, "torch")
    for flags, title in ((None, "jdistgrad run -n 2"), (BOUND, "plain mpirun -n 2: each rank bound to one core")):
        print(f"\n{title}; medians of {chosen.rounds} jobs each, in turn")
        row("", "jdistgrad", "the other", "ratio", "target")
        table(take_turns(names, chosen.rounds, flags))


if __name__ == "__main__":
    main()
