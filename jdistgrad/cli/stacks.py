"""`jdistgrad stacks`: what the ranks of a running job wait for, or what those of an ended job wrote at an error."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the processes of a job have said.

    Attributes:
      fresh: the snapshots that they wrote when they were asked.
      earlier: the latest ones of processes that have ended, or that do not answer from another machine.
      silent: the processes that have given none, or none now although they run.
    """

    fresh: list[Mapping[str, Any]]
    earlier: list[Mapping[str, Any]]
    silent: list[Silent]


def main(job: str | None, events: int, seconds: float, *, even_handled: bool = False) -> int:
    """Ask a job's processes what they wait for, and print their report.

    Arguments:
      even_handled: whether to send SIGUSR1 also where the program has a handler of its own.
    """
    found = choose(job, jobs(files.root()))
    if found is None:
        return 1
    answers = gathered(found, seconds, even_handled=even_handled)
    title = f"{found.folder}: {len(answers.fresh)} of {len(found.processes)} processes say what they wait for"
    title += f"; {len(answers.earlier)} said it earlier" if answers.earlier else ""
    print(render(title, answers.fresh, answers.silent, events, answers.earlier), end="")
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


def gathered(job: Job, seconds: float, *, even_handled: bool = False) -> Answers:
    """Ask the processes of a job for snapshots, and return what they say within some seconds.

    First all are asked through the folder. Those here that do not answer are sent SIGUSR1, on which they write their
    stacks even where Python stands still. A process that has not announced itself is sent nothing: it would be killed.
    """
    asked = ask(job) if any(map(files.may_run, job.processes.values())) else 0
    wait_until(lambda: not late(job, asked), min(seconds, SIGNAL_AFTER))
    here = job.running()
    hang = [label for label in late(job, asked) if label in here]
    signalled = [label for label in hang if send_signal(job, label, even_handled=even_handled)]
    wait_until(lambda: not late(job, asked), max(0.0, seconds - SIGNAL_AFTER))
    wait_until(lambda: all(stacks_of(job, one) for one in late(job, asked) if one in signalled), STACKS_SECONDS)
    return sorted_out(job, asked, signalled, seconds)


def sorted_out(job: Job, asked: int, signalled: Collection[str], seconds: float) -> Answers:
    written, running, found = files.read(job.folder, files.WAITS), job.running(), Answers([], [], [])
    for label, process in sorted(job.processes.items()):
        if label in written and asked and is_fresh(job, label, asked):
            found.fresh.append(written[label])
        elif label in written and label not in running:
            found.earlier.append(dated(written[label], why_silent(process, seconds), time.time()))
        elif label in running:
            found.silent.append(standing(job, label, signalled=label in signalled, seconds=seconds))
        else:
            found.silent.append(Silent(label, process, why_silent(process, seconds), stacks_of(job, label)))
    return found


def ask(job: Job) -> int:
    try:
        return files.ask(job.folder)
    except OSError as error:
        raise LauncherError(
            f"the job's processes cannot be asked: {error}. Only the user who started the job can ask, while it runs."
        ) from error


def is_fresh(job: Job, label: str, asked: int) -> bool:
    return files.changed(job.folder / f"{label}{files.WAITS}") >= asked


def late(job: Job, asked: int) -> list[str]:
    """Return the processes that have not answered, and run or are another machine's that shares the folder."""
    return [label for label, one in job.processes.items() if files.may_run(one) and not is_fresh(job, label, asked)]


def send_signal(job: Job, label: str, *, even_handled: bool) -> bool:
    """Send a process SIGUSR1 if it can only do what it is sent for. Return whether it was sent."""
    process = files.read_processes(job.folder).get(label, job.processes[label])
    pid = process["pid"]
    if has_handler(process) and not even_handled:
        return False
    if not processes.is_running(pid, process["start"]) or not processes.catches(pid, signal.SIGUSR1):
        return False
    with contextlib.suppress(OSError):
        os.truncate(job.folder / f"{label}{files.STACKS}", 0)  # of an earlier signal
        os.kill(pid, signal.SIGUSR1)
    return True


def has_handler(process: Mapping[str, Any]) -> bool:
    return bool(process.get(files.HANDLER))


def stacks_of(job: Job, label: str) -> str:
    try:
        return (job.folder / f"{label}{files.STACKS}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def why_silent(process: Mapping[str, Any], seconds: float) -> str:
    """Return what is known of a process that gave no snapshot now, and does not run here."""
    if process["host"] == socket.gethostname():
        return "it has ended"
    return f"on another machine, it did not answer within {seconds:g} s (jdistgrad stacks there says whether it runs)"


def dated(snapshot: Mapping[str, Any], why: str, now: float) -> dict[str, Any]:
    return {**snapshot, "cause": f"{snapshot['cause']}: {why}; it wrote this {now - snapshot['time']:.0f} s ago"}


def standing(job: Job, label: str, *, signalled: bool, seconds: float) -> Silent:
    """Describe a process that runs here and has not answered."""
    process = files.read_processes(job.folder).get(label, job.processes[label])
    why = f"it did not answer within {seconds:g} s; Python does not run in it"
    stacks = stacks_of(job, label) if signalled else ""
    if stacks:
        return Silent(label, process, f"{why}; these are its stacks", stacks)
    if signalled or not has_handler(process):
        return Silent(label, process, f"{why}, and it shows no stacks: it may be stopped")
    kept = "its program handles SIGUSR1, so it was not sent the signal that shows its stacks: --signal sends it"
    return Silent(label, process, f"{why}; {kept}")


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(PAUSE)
