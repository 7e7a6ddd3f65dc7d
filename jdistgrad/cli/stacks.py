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
    for file in _silent(files, SIGNAL_AFTER):
        if (process := _process(file)) is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process, signal.SIGUSR1)
    _silent(files, seconds)
    for file in files:
        text = file.read_text(encoding="utf-8").rstrip()
        text = text or "    no answer: it is stopped, or runs on another machine that does not see this folder"
        print(f"== {file.stem} ==\n{text}\n")
    return 0


def _chosen(job: str | None) -> pathlib.Path:
    running = [folder for folder in sorted(root().glob("*") if job is None else [root() / job]) if _files(folder)]
    if len(running) == 1:
        return running[0]  # an absolute path stays as it is
    if running:
        names = ", ".join(folder.name for folder in running)
        raise LauncherError(f"several jobs are running; name one: jdistgrad stacks JOB, with {names}")
    where = f"in {root() / job}" if job is not None else "here"
    raise LauncherError(f"no running job has files {where}. {HOW}.")


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
    """Return the process id in a file's name, ``rank1-machine-number.txt``; None if it is of another machine."""
    machine, _, number = file.stem.partition("-")[2].rpartition("-")
    return int(number) if machine == os.uname().nodename else None


def _silent(files: list[pathlib.Path], seconds: float) -> list[pathlib.Path]:
    """Wait for answers; return the files without one."""
    deadline = time.monotonic() + seconds
    while silent := [file for file in files if END not in file.read_text(encoding="utf-8")]:
        if time.monotonic() > deadline:
            break
        time.sleep(PAUSE)
    return silent
