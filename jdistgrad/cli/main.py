"""The command line: ``jdistgrad run``, ``stacks``, ``doctor``, ``bench`` and ``trace``."""

import argparse
import contextlib
import functools
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from jdistgrad._version import __version__
from jdistgrad.cli import doctor, launch, programs
from jdistgrad.errors import DistgradError, LauncherError, TimelineError
from jdistgrad.observe import timeline as timelines


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="jdistgrad", description="Gradients that cross process boundaries, in pure JAX.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True)
    start = commands.add_parser(
        "run",
        help="run a Python program on several ranks, with mpirun and the flags it needs",
        usage="jdistgrad run [options] (script.py | -m module | -c code) [arguments]",
    )
    start.add_argument("-n", "-np", type=int, default=2, help="how many ranks (default 2)")
    start.add_argument("--local", action="store_true", help="as threads of one process instead, without MPI")
    start.add_argument("--timeline", metavar="FILE", help="record what every worker does, for ui.perfetto.dev")
    start.add_argument("--cache", metavar="FOLDER", help="keep what JAX compiles there, for the next run")
    start.add_argument(
        "--restarts", type=int, default=0, metavar="K", help="start a job that fails again, K times at most"
    )
    start.add_argument("--survive", action="store_true", help="go on without ranks that die (Open MPI 5 only)")
    start.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="the program is a module")
    start.add_argument("-c", dest="code", nargs=argparse.REMAINDER, help="the program is this code")
    start.add_argument("script", nargs=argparse.REMAINDER, help="the program is a file")
    start.set_defaults(act=run)

    look = commands.add_parser("stacks", help="show what the ranks of a job wait for, and their stacks")
    look.add_argument("job", nargs="?", help="the job's folder, or its name, if several jobs are running")
    look.add_argument("--wait", type=float, default=4.0, metavar="SECONDS", help="how long to wait for answers (4)")
    look.set_defaults(act=lambda options: _module("stacks").main(options.job, options.wait))

    check = commands.add_parser("doctor", help="check this installation; under mpirun: that of every rank")
    check.add_argument("-n", type=int, default=2, help="how many ranks to try with (default 2)")
    check.set_defaults(act=lambda options: doctor.main(options.n))

    measure = commands.add_parser("bench", help="measure calls, gradients and reductions here, next to a reference")
    measure.add_argument("-n", type=int, default=2, help="how many workers (default 2)")
    measure.set_defaults(act=lambda options: _module("bench").main(options.n))

    merge = commands.add_parser("trace", help="make one timeline of those of several ranks")
    merge.add_argument("files", nargs="+", help="what `with jdistgrad.timeline(FILE)` wrote on each rank")
    merge.add_argument("-o", "--output", required=True, help="the file to write, for ui.perfetto.dev")
    merge.add_argument("--plot", metavar="FILE", help="draw it too (png, svg or pdf); needs matplotlib")
    merge.set_defaults(act=trace)
    return top


def _module(name: str) -> Any:
    """Import a command's module only when it runs: it imports JAX."""
    return importlib.import_module(f"jdistgrad.cli.{name}")


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the program of ``run`` with its arguments, as Python takes them."""
    if options.module is not None:
        return ["-m", *options.module]
    return options.script if options.code is None else ["-c", *options.code]


def run(options: argparse.Namespace) -> int:
    program = program_of(options)
    if options.timeline is not None:
        timelines.check_writable(options.timeline)
    if options.cache is not None:
        launch.keep_compiled(options.cache)
    if options.restarts < 0:
        raise LauncherError(f"--restarts takes a number of times, 0 or more, not {options.restarts}")
    if not options.local:
        run = launch.run if options.timeline is None else functools.partial(launch.run_recorded, options.timeline)
        return run(options.n, program, options.restarts, survive=options.survive)
    if options.survive:
        raise LauncherError("--survive and --local: the workers are threads of one process, and die together")
    if options.restarts:
        raise LauncherError("--restarts starts processes again; with --local there are only threads of this one")
    programs.check(program)
    with contextlib.ExitStack() as recorded:
        if options.timeline is not None:
            recorded.enter_context(timelines.timeline(options.timeline))
        status = programs.run_local(options.n, program)
    if status == programs.INTERRUPTED:
        programs.end_now(status)
    return status


def trace(options: argparse.Namespace) -> int:
    for file in filter(None, (options.output, options.plot)):
        timelines.check_writable(file)
    merged = timelines.merge({file: timelines.read(file) for file in options.files})
    timelines.write(merged, options.output)
    if options.plot is not None:
        try:
            timelines.plot(merged).figure.savefig(options.plot)
        except ValueError as error:  # matplotlib knows other formats
            raise TimelineError(f"{options.plot}: {error}") from error
    print(timelines.summary(merged, options.output))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options, unknown = parser().parse_known_args(arguments)
    if unknown and options.command != "run":
        parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if unknown:  # options of mpirun, which starts jobs on several machines
            raise LauncherError(
                f"{unknown[0]} is no option of `jdistgrad run`, which starts ranks on this machine. For several "
                "machines, or other options, use mpirun or srun: mpirun --hostfile hosts -n 8 python program.py."
            )
        return options.act(options)
    except DistgradError as error:
        print(f"jdistgrad {options.command}: {error}", file=sys.stderr)
        return 2
