"""Inject faults and print a table of what happened: ``make faults``, ``python -m faults --help``."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from faults.outcomes import Outcome, table
from faults.rows import ROWS, Row


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m faults", description="Inject faults and count what happens.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--share", type=float, default=1.0, help="of the full counts (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def run(row: Row, count: int, seed: int) -> list[Outcome]:
    """Inject the faults of one row; print each outcome that is not what was promised."""
    outcomes, start = [], time.monotonic()
    for one in row.inject(count, seed):
        outcomes.append(one)
        if not one.good:
            print(f"\n{one.kind}: {one.fault}\n{one.text}", flush=True)
    print(f"{row.name}: {len(outcomes)} injected in {time.monotonic() - start:.0f} s", flush=True)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    found = {name: run(ROWS[name], max(1, round(ROWS[name].full * chosen.share)), chosen.seed) for name in chosen.rows}
    print("", *table(found), sep="\n")
    return 0 if all(one.good for outcomes in found.values() for one in outcomes) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
