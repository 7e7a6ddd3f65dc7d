"""Measuring: medians inside a job; jobs that take turns; rows of a table.

Two libraries are never measured in one process: PyTorch's transport spins on a core of its own all the time, and
whatever runs beside it pays. So each has a job to itself, the jobs take turns, and a ratio is the median of the ratios
of neighbours: a machine that drifts does so for both.
"""

import collections
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from jdistgrad import launch

IN_FLIGHT = 32
MARK = "measured: "


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def median(function: Callable[[], object], calls: int, warm_up: int = 20) -> float:
    """The median time of a call."""
    for _ in range(min(warm_up, calls)):
        function()
    return statistics.median(seconds(function) for _ in range(calls))


def pipelined(start: Callable[[], object], finish: Callable[[object], object], calls: int) -> float:
    """Calls per second, with IN_FLIGHT of them under way."""

    def run() -> None:
        waiting: collections.deque = collections.deque()
        for _ in range(calls):
            if len(waiting) == IN_FLIGHT:
                finish(waiting.popleft())
            waiting.append(start())
        while waiting:
            finish(waiting.popleft())

    run()
    return calls / seconds(run)


def report(**figures: float) -> None:
    """What a job has measured, for the program that started it."""
    print(MARK + json.dumps(figures), flush=True)


def run_job(script: str, *, n: int = 2, flags: list[str] | None = None) -> dict[str, float]:
    """Run a script on ``n`` ranks; what it reported. ``flags``: mpirun's, in place of our launcher's."""
    command = launch.command(n, [script])
    if flags is not None:
        command = [command[0], *flags, "-n", str(n), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found.update(json.loads(line.removeprefix(MARK)))
    if done.returncode or not found:
        sys.exit(f"{script} failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def ratio(ours: list[float], others: list[float]) -> float:
    """The median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def row(what: str, ours: str, other: str, compared: str, target: str) -> None:
    print(f"{what:<54} {ours:>12} {other:>22} {compared:>7}   {target}", flush=True)
