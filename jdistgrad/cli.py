"""The command line: ``jdistgrad run`` and ``jdistgrad doctor``."""

import argparse
import sys
from collections.abc import Sequence

from jdistgrad import launch
from jdistgrad._version import __version__
from jdistgrad.errors import DistgradError
from jdistgrad.observe import doctor


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="jdistgrad", description="Gradients that cross process boundaries, in pure JAX.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="run a Python program on several ranks, with mpirun and the flags it needs")
    run.add_argument("-n", type=int, default=2, help="how many ranks (default 2)")
    run.add_argument("program", nargs="*", help="script.py [arguments], or -m module [arguments]")

    check = commands.add_parser("doctor", help="check this installation; under mpirun: that of every rank")
    check.add_argument("-n", type=int, default=2, help="how many ranks to try with (default 2)")
    return top


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the program to run with its: from the first that is neither an option nor its value."""
    if not arguments or arguments[0] != "run":
        return list(arguments), []
    k = 1
    while k < len(arguments) and arguments[k].startswith("-") and arguments[k] not in ("-m", "-c"):
        k += 2 if arguments[k] == "-n" else 1
    return list(arguments[:k]), list(arguments[k:])


def main(arguments: Sequence[str] | None = None) -> int:
    ours, program = split(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(ours)
    try:
        if options.command == "run":
            return launch.run(options.n, program)
        return doctor.main(options.n)
    except DistgradError as error:
        print(f"jdistgrad {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
