"""Tools of the benchmarks: medians inside a job, jobs that take turns, rows of a table.

Two libraries are never measured in one process: PyTorch's transport spins on a core of its own all the time, and slows
everything that runs beside it. So each library has jobs of its own, the jobs take turns, and a ratio is the median over
the ratios of neighboring jobs: if the machine's speed drifts, it drifts for both.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jdistgrad.cli import launch

ROWS: list["Row"] = []  # of all tables this process has printed
JOBS = pathlib.Path(__file__).parent / "jobs"
IN_FLIGHT = 32
MARK = "measured: "
SHORT = "--short" in os.environ.get("JDISTGRAD_BENCH", "")
FAILED: list[str] = []  # sections whose rows are missing


def few(count: int, least: int = 2) -> int:
    """Return a number of calls, or a size; in a short run, which only shows that the benchmark works, a small one."""
    return min(count, least) if SHORT else count


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def times(function: Callable[[], object], calls: int, warm_up: int = 20) -> list[float]:
    """Return the time of each of so many calls."""
    for _ in range(min(few(warm_up), calls)):
        function()
    return [seconds(function) for _ in range(few(calls))]


def median(function: Callable[[], object], calls: int, warm_up: int = 20) -> float:
    """Return the median time of a call."""
    return statistics.median(times(function, calls, warm_up))


def in_turn(
    functions: Sequence[Callable[[], object]], calls: int, together: Callable[[], object], warm_up: int = 3
) -> list[float]:
    """Return the median time of each function. The functions are called in turn, so a disturbance affects all of them.

    Arguments:
      together: returns when all ranks have called it. Without it a call would also measure how late
        another rank is, where the call before it waits for no other rank.
    """
    for _ in range(few(warm_up)):
        for function in functions:
            function()

    def timed(function: Callable[[], object]) -> float:
        together()
        return seconds(function)

    rounds = [[timed(function) for function in functions] for _ in range(few(calls))]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def pipelined(start: Callable[[], object], finish: Callable[[object], object], calls: int) -> float:
    """Return the calls per second, with IN_FLIGHT calls under way."""

    def run() -> None:
        waiting: collections.deque = collections.deque()
        for _ in range(few(calls)):
            if len(waiting) == IN_FLIGHT:
                finish(waiting.popleft())
            waiting.append(start())
        while waiting:
            finish(waiting.popleft())

    run()
    return calls / seconds(run)


def report(**figures: Any) -> None:
    """Print a job's measurements for the program that started the job."""
    print(MARK + json.dumps(figures), flush=True)


class JobError(RuntimeError):
    """A job has failed, or reported nothing."""


def run_job(script: str, *, n: int = 2, flags: list[str] | None = None, survive: bool = False) -> dict[str, Any]:
    """Run a script on ``n`` ranks and return what it reported.

    Arguments:
      flags: replace our launcher's flags for mpirun.
      survive: go on without ranks that die.
    """
    command = launch.command(n, [script], survive=survive)
    if flags is not None:
        command = [command[0], *flags, "-n", str(n), sys.executable, script]
    around = (launch.SURVIVING if survive else {}) | launch.environment(n) if flags is None else None
    done = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found.update(json.loads(line.removeprefix(MARK)))
    if done.returncode or not found:
        raise JobError(f"{script} failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def take_turns(
    topic: str, names: Sequence[str], rounds: int, flags: list[str] | None = None, n: int = 2
) -> dict[str, dict[str, list[float]]]:
    """Run the jobs of a topic on ``n`` ranks in turn, ``rounds`` times. Return each figure of each job, by rounds."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for k in range(rounds):
        os.environ["JDISTGRAD_BENCH"] = "--long" if k == 0 and flags is None else ""
        for name in names:
            for figure, value in run_job(str(JOBS / f"{topic}_{name}.py"), n=n, flags=flags).items():
                found[name].setdefault(figure, []).append(value)
    return found


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Open a block beside which processes compute all the time, as training does on the cores of a node."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in loops:
            one.kill()
            one.wait()


def ratio(ours: list[float], others: list[float]) -> float:
    """Return the median of the ratios of neighboring jobs."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def microseconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e6:.0f} us"


def milliseconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f} ms"


def per_second(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} /s"


class Row(NamedTuple):
    """Line of a table, as it is printed."""

    what: str
    ours: str
    other: str
    compared: str
    target: str


def compare(what, unit, ours, name, others, target):
    if others is None:
        row(what, unit(ours), "", "", target)
    else:
        row(what, unit(ours), f"{name} {unit(others)}", f"{ratio(ours, others):.2f}", target)


def row(*columns: str) -> None:
    ROWS.append(Row(*columns))
    what, ours, other, compared, target = columns
    print(f"{what:<54} {ours:>12} {other:>22} {compared:>7}   {target}", flush=True)


@contextlib.contextmanager
def section(text: str) -> Iterator[None]:
    """Open a block that prints rows under a title. If one of its jobs fails, the other sections go on."""
    print(f"\n{text}", flush=True)
    row("", "jdistgrad", "the other", "ratio", "target")
    try:
        yield
    except JobError as error:
        FAILED.append(text)
        print(f"FAILED: {error}", file=sys.stderr, flush=True)


def ended() -> None:
    """End the program: with an error if sections have failed, which it names."""
    if FAILED:
        sys.exit("\n".join(["", "these sections failed, so their rows are missing:", *(f"  {one}" for one in FAILED)]))


def options(text: str | None) -> argparse.Namespace:
    """Return the options that all benchmarks have: ``rounds``, and ``torch`` (whether to measure PyTorch too)."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each kind (default 5)")
    parser.add_argument("--ours-only", action="store_true", help="leave PyTorch out")
    chosen = parser.parse_args()
    chosen.torch = not chosen.ours_only and importlib.util.find_spec("torch") is not None
    return chosen
