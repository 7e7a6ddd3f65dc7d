"""`jdistgrad stacks`: what the ranks of a running job wait for, or what those of an ended job wrote at an error."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdistgrad.errors import LauncherError
from jdistgrad.observe.wait_report import Silent, render
from jdistgrad.rpc.flight import folder as files, processes

PAUSE = 0.05
SIGNAL_AFTER = 1.0  # seconds: a rank that does not answer by then is sent SIGUSR1
STACKS_SECONDS = 1.0  # for what faulthandler writes then

HOW = "Start it with JDISTGRAD_DEBUG=1 in its environment (JDISTGRAD_DEBUG=1 jdistgrad run ...)"


@dataclasses.dataclass(frozen=True)
class Job:
    """A job's folder, and what its processes have said of themselves, by what their files are called after."""

    folder: pathlib.Path
    processes: Mapping[str, Mapping[str, Any]]

    def running(self) -> dict[str, Mapping[str, Any]]:
        """Return the processes that run on this machine."""
        host = socket.gethostname()
        return {
            label: one
            for label, one in self.processes.items()
            if one["host"] == host and processes.is_running(one["pid"], one["start"])
        }

    def launcher(self) -> int:
        """Return the process id by which to name a running job: of its launcher, or its only process."""
        one = next(iter(self.running().values()))
        return one["pid"] if one["rank"] is None else processes.parent_of(one["pid"]) or one["pid"]


def main(job: str | None, events: int, seconds: float) -> int:
    """Ask a job's processes what they wait for, and print their report."""
    found = choose(job, jobs(files.root()))
    if found is None:
        return 1
    snapshots, silent = gathered(found, seconds)
    title = f"{found.folder}: {len(snapshots)} of {len(found.processes)} processes say what they wait for"
    print(render(title, snapshots, silent, events), end="")
    return 0


def jobs(root: pathlib.Path) -> list[Job]:
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [Job(folder, read) for folder in folders if (read := files.read_processes(folder))]


def choose(job: str | None, known: Sequence[Job]) -> Job | None:
    """Return the job that is meant, or None after printing those that run.

    Raises:
      LauncherError: there is no such job, or none that records what it does.
    """
    running = [one for one in known if one.running()]
    if job is None and len(running) == 1:
        return running[0]
    if job is None and running:
        print("several jobs are running; name one: jdistgrad stacks JOB", *map(line_of, running), sep="\n")
        return None
    if job is None:
        raise LauncherError(f"no job that is running here records what it does. {HOW}.")
    if pathlib.Path(job).is_dir():
        folder = pathlib.Path(job).absolute()
        read = files.read_processes(folder)
        if read:
            return Job(folder, read)
        raise LauncherError(f"{folder} is not the folder of a job: no process has announced itself there.")
    return by_process(job, running)


def by_process(job: str, running: Sequence[Job], descends: Callable[[int, int], bool] | None = None) -> Job:
    """Return the job that a process has started, directly or not, or belongs to."""
    descends = descends or processes.descends_from
    if not job.isdecimal():
        raise LauncherError(f"{job!r} is neither the process id of a job (of `jdistgrad run` or mpirun) nor a folder.")
    for one in running:
        if any(descends(process["pid"], int(job)) for process in one.running().values()):
            return one
    raise LauncherError(f"process {job} has no ranks here that record what they do. {HOW}; and name its launcher.")


def line_of(job: Job) -> str:
    first = next(iter(job.running().values()))
    ticks = (processes.uptime_ticks() - first["start"]) / os.sysconf("SC_CLK_TCK") if first["start"] else 0.0
    return f"{job.launcher():>8}  {len(job.running())} processes  {ticks:6.0f} s  {' '.join(first['command'])}"


def gathered(job: Job, seconds: float) -> tuple[list[Mapping[str, Any]], list[Silent]]:
    """Return the snapshots of a job, and the processes that gave no new one although they run.

    First all are asked through the folder. Those that do not answer are sent SIGUSR1, on which they write their stacks
    even where Python stands still. A process that has not announced itself is sent nothing: it would be killed.
    """
    running, asked = job.running(), 0
    if running:
        asked = files.ask(job.folder)
        wait_until(lambda: not late(job, running, asked), min(seconds, SIGNAL_AFTER))
        hang = late(job, running, asked)
        for label in hang:
            send_signal(job, label)
        if hang:
            wait_until(lambda: not late(job, running, asked), max(0.0, seconds - SIGNAL_AFTER))
    slow = late(job, running, asked)
    if slow:
        wait_until(lambda: all(stacks_of(job, label) for label in slow), STACKS_SECONDS)
    written = files.read(job.folder, files.WAITS)
    fresh = [written[label] for label in sorted(job.processes) if label in written and label not in slow]
    missing = [label for label in sorted(job.processes) if label in slow or label not in written]
    return fresh, [silent_one(job, label, alive=label in running) for label in missing]


def late(job: Job, running: Mapping[str, Any], asked: int) -> list[str]:
    return [label for label in running if files.changed(job.folder / f"{label}{files.WAITS}") < asked]


def send_signal(job: Job, label: str) -> None:
    process = job.processes[label]
    if processes.is_running(process["pid"], process["start"]):
        with contextlib.suppress(OSError):
            os.truncate(job.folder / f"{label}{files.STACKS}", 0)  # of an earlier signal
            os.kill(process["pid"], signal.SIGUSR1)


def stacks_of(job: Job, label: str) -> str:
    try:
        return (job.folder / f"{label}{files.STACKS}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def silent_one(job: Job, label: str, *, alive: bool) -> Silent:
    process, stacks = job.processes[label], stacks_of(job, label)
    if process["host"] != socket.gethostname():
        why = "on another machine. Run this there, or give the job a JDISTGRAD_DEBUG_DIR that all its machines share"
        return Silent(label, process, why)
    if not alive:
        return Silent(label, process, "it has ended, and has not said what it waited for", stacks)
    told = "these are its stacks" if stacks else "nor its stacks; it may be stopped"
    return Silent(label, process, f"it runs, but could not say what it waits for (Python stands still); {told}", stacks)


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(PAUSE)
