"""Benchmark of calls between two processes, against PyTorch's RPC and against MPI itself.

    python benchmarks/calls.py            # make bench

PyTorch (2.13) is optional: without PyTorch, its columns stay empty.
"""

import os
import statistics

from measure import (
    busy_processes,
    compare,
    ended,
    microseconds,
    milliseconds,
    options,
    per_second,
    row,
    section,
    take_turns,
)

BUSY = 2
LEAST = {"numpy": "<= 2 x", "jax": "<= 2.5 x"}
LEAST_BUSY = {"numpy": "<= 3 x", "jax": "<= 3.5 x"}
BOUND = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def table(found, how):
    ours, mpi, torch, floor = found["jdistgrad"], found["mpi"], found.get("torch", {}), found["floor"]
    for kind in ("numpy", "jax"):
        array = {"numpy": "NumPy array", "jax": "JAX array"}[kind]
        what = f"round trip of a Python function, 4 B {array}{how}"
        compare(what, microseconds, ours[f"small_{kind}"], "torch", torch.get("small"), "<= 0.25 x")
        compare(what, microseconds, ours[f"small_{kind}"], "the least", floor["spin"], LEAST[kind])
        what = f"32 calls in flight, 4 B {array}{how}"
        compare(what, per_second, ours[f"rate_{kind}"], "torch", torch.get("rate"), ">= 4 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "torch", torch.get("large"), "<= 0.8 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "Sendrecv", mpi["exchange"], "<= 1.5 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "Send, Recv", mpi["there_and_back"], "")
    if "idle" in ours:
        row("CPU of an idle worker", f"{100 * ours['idle'][0]:.1f} %", "", "", "<= 5 % of a core")
        row("memory over 100,000 calls and references", f"{ours['growth'][0]:+.1f} MiB", "", "", "flat")
        row("values still owned after them", f"{ours['owned'][0]:.0f}", "", "", "0")


def beside_others(found):
    """Print means: where cores are busy, a few calls that lose their time slice cost more than all others."""
    ours, torch, floor = found["jdistgrad"], found.get("torch", {}), found["floor"]
    least = min((floor[way] for way in ("bell_50_mean", "bell_200_mean")), key=statistics.median)
    for kind in ("numpy", "jax"):
        array = {"numpy": "NumPy array", "jax": "JAX array"}[kind]
        what = f"round trip of a Python function, 4 B {array}, mean"
        compare(what, microseconds, ours[f"small_{kind}_mean"], "the least", least, LEAST_BUSY[kind])
        compare(what, microseconds, ours[f"small_{kind}_mean"], "torch", torch.get("small_mean"), "")
        what = f"32 calls in flight, 4 B {array}"
        compare(what, per_second, ours[f"rate_{kind}"], "torch", torch.get("rate"), "")


def main(chosen):
    names = ["jdistgrad", *(["torch"] if chosen.torch else []), "mpi", "floor"]
    ways = (None, "jdistgrad run -n 2", ""), (BOUND, "plain mpirun -n 2: each rank bound to one core", ", bound")
    for flags, how, mark in ways:
        with section(f"{how}; medians of {chosen.rounds} jobs each, in turn"):
            table(take_turns("calls", names, chosen.rounds, flags), mark)
    with section(f"beside {BUSY} processes that compute; {chosen.rounds} jobs each, in turn"), busy_processes(BUSY):
        beside_others(take_turns("calls", [one for one in names if one != "mpi"], chosen.rounds))


if __name__ == "__main__":
    main(options(__doc__))
    ended()
