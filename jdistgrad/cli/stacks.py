"""`jdistgrad stacks`: what the ranks of a running job wait for, and the stacks of their threads."""

import contextlib
import os
import pathlib
import signal
import time

from jdistgrad.errors import LauncherError
from jdistgrad.rpc.waits import ASKED, END, root

SIGNAL_AFTER = 1.0  # seconds: a rank that does not answer by then is sent SIGUSR1
PAUSE = 0.05

HOW = "Start it with JDISTGRAD_DEBUG=1 in its environment (JDISTGRAD_DEBUG=1 jdistgrad run ...)"


def main(job: str | None, seconds: float) -> int:
    """Ask a job's processes what they wait for, and print it.

    Arguments:
      job: the job's folder, or its name there.
      seconds: how long to wait for processes that do not answer.
    """
    folder = _chosen(job)
    files = _files(folder)
    for file in files:
        file.write_text("", encoding="utf-8")
    (folder / ASKED).write_text("now", encoding="utf-8")
    _wait_for(files, SIGNAL_AFTER)
    for file in files:
        if END not in file.read_text(encoding="utf-8") and (process := _process(file)) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process, signal.SIGUSR1)
    _wait_for(files, seconds)
    for file in files:
        text = file.read_text(encoding="utf-8").rstrip()
        text = text or "    it gave no answer: it is stopped, or runs on another machine that does not see this folder"
        print(f"== {file.stem} ==\n{text}\n")
    return 0


def _chosen(job: str | None) -> pathlib.Path:
    if job is not None and not _files(root() / job):  # an absolute path stays as it is
        raise LauncherError(f"no process of a running job has its file in {root() / job}. {HOW}.")
    running = [folder for folder in sorted(root().glob("*")) if _files(folder)] if job is None else [root() / job]
    if not running:
        raise LauncherError(f"no job that is running here says what it does. {HOW}.")
    if len(running) > 1:
        names = ", ".join(folder.name for folder in running)
        raise LauncherError(f"several jobs are running; name one: jdistgrad stacks JOB, with {names}")
    return running[0]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a job's processes that may run; remove those of processes of this machine that ended."""
    found = []
    for file in sorted(folder.glob("rank*.txt"), key=lambda one: int(one.stem.split("-")[0][4:])):
        try:
            if (process := _process(file)) is not None:
                os.kill(process, 0)
            found.append(file)
        except OSError:
            file.unlink(missing_ok=True)
    return found


def _process(file: pathlib.Path) -> int | None:
    """Return the number of the process of a file, ``rank1-machine-number.txt``; None for one of another machine."""
    machine, _, number = file.stem.partition("-")[2].rpartition("-")
    return int(number) if machine == os.uname().nodename else None


def _wait_for(files: list[pathlib.Path], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(END not in file.read_text(encoding="utf-8") for file in files):
        time.sleep(PAUSE)
