"""Benchmark of calls between two processes, against PyTorch's RPC and against MPI itself.

    python benchmarks/calls.py            # make bench

PyTorch (2.13) is optional: without PyTorch, its columns stay empty.
"""

import os

from measure import compare, ended, microseconds, milliseconds, options, per_second, row, section, take_turns

BOUND = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def table(found, how):
    ours, mpi, torch = found["jdistgrad"], found["mpi"], found.get("torch", {})
    for kind in ("numpy", "jax"):
        array = {"numpy": "NumPy array", "jax": "JAX array"}[kind]
        what = f"round trip of a Python function, 4 B {array}{how}"
        compare(what, microseconds, ours[f"small_{kind}"], "torch", torch.get("small"), "<= 0.25 x")
        what = f"32 calls in flight, 4 B {array}{how}"
        compare(what, per_second, ours[f"rate_{kind}"], "torch", torch.get("rate"), ">= 4 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "torch", torch.get("large"), "<= 0.8 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "Sendrecv", mpi["exchange"], "<= 1.5 x")
    compare(f"round trip, 64 MiB{how}", milliseconds, ours["large"], "Send, Recv", mpi["there_and_back"], "")
    if "idle" in ours:
        row("CPU of an idle worker", f"{100 * ours['idle'][0]:.1f} %", "", "", "<= 5 % of a core")
        row("memory over 100,000 calls and references", f"{ours['growth'][0]:+.1f} MiB", "", "", "flat")
        row("values still owned after them", f"{ours['owned'][0]:.0f}", "", "", "0")


def main(chosen):
    names = ["jdistgrad", *(["torch"] if chosen.torch else []), "mpi"]
    ways = (None, "jdistgrad run -n 2", ""), (BOUND, "plain mpirun -n 2: each rank bound to one core", ", bound")
    for flags, how, mark in ways:
        with section(f"{how}; medians of {chosen.rounds} jobs each, in turn"):
            table(take_turns("calls", names, chosen.rounds, flags), mark)


if __name__ == "__main__":
    main(options(__doc__))
    ended()
