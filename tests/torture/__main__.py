"""Random programs in every kind of world, and counts of failures: ``make torture``, ``python -m torture --help``."""

import argparse
import collections
import signal
import sys
import time
from collections.abc import Sequence

from torture import generator, watching
from torture.judging import CRASH, HANG, MISMATCH
from torture.programs import FEATURES
from torture.watching import Verdict, World

WORLDS = ("local-2", "local-3", "local-4", "mpi-2", "mpi-3", "mpi-4")
KINDS = {MISMATCH: "mismatches", CRASH: "crashes", HANG: "hangs"}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    known = "\n".join(f"  {name}: {what}" for name, what in FEATURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m torture",
        description="Run random programs and compare each with the serial one.",
        epilog=f"features:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", type=int, default=500, help="how many, in each world (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="that of the first (default 0)")
    parser.add_argument("--seeds", type=int, nargs="+", help="these programs, instead of so many from the first")
    parser.add_argument("--worlds", nargs="+", type=World, default=[World(name) for name in WORLDS])
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES), metavar="FEATURE")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each program (default 60)")
    return parser.parse_args(arguments)


def run(world: World, chosen: argparse.Namespace) -> bool:
    """Run the programs in one world, and print failures and counts. Return whether there was no failure."""
    counts, start = collections.Counter(), time.monotonic()
    seeds = chosen.seeds or range(chosen.seed, chosen.seed + chosen.programs)
    for verdict in watching.verdicts(world, seeds, chosen.features, chosen.limit):
        counts[verdict.kind] += 1
        if verdict.kind:
            print(described(world, verdict, chosen), flush=True)
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in KINDS.items())
    print(f"{world.name}: {counts.total()} programs, {told} ({time.monotonic() - start:.0f} s)", flush=True)
    return counts.total() == counts[""]


def described(world: World, verdict: Verdict, chosen: argparse.Namespace) -> str:
    """Describe a failure: the command that repeats it, the program, and the problems found.

    Code that the process has compiled for earlier programs may be part of the cause, so their seeds are printed too.
    """
    command = f"PYTHONPATH=tests .venv/bin/python -m torture --worlds {world.name}"
    if set(chosen.features) != set(FEATURES):
        command += f" --features {' '.join(chosen.features)}"
    before = f"\nin its process ran before: --seeds {' '.join(map(str, verdict.before))}" if verdict.before else ""
    program = generator.draw(verdict.seed, chosen.features)
    return f"\n{verdict.kind}: {command} --seeds {verdict.seed}{before}\n{program}\n{verdict.text}"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    right = [run(world, chosen) for world in chosen.worlds]
    return 0 if all(right) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C, to end the batch under way too
    sys.exit(main())
