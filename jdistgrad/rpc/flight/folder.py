"""The folder of a job, in which each of its processes announces itself and writes what it waits for.

A process has three files, called after its rank: ``rank2.process.json`` (who it is, from the start),
``rank2.waits.json`` (its latest snapshot) and ``rank2.stacks.txt`` (what faulthandler writes on SIGUSR1, also where
Python stands still). Two more belong to all, and whoever writes them wants new snapshots: ``asked`` by ``jdistgrad
stacks``, ``trouble`` by a rank that has found an error.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import socket
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from jdistgrad.config import settings
from jdistgrad.rpc.flight import processes
from jdistgrad.wire import launcher_env

PROCESS, WAITS, STACKS = ".process.json", ".waits.json", ".stacks.txt"
HANDLER = "own_handler"  # whether the program handles SIGUSR1, in what a process says of itself
NEEDED = {"rank", "pid", "start", "host", "command"}  # what a process says of itself, at least
ASKED, TROUBLE = "asked", "trouble"
KEPT_SECONDS = 7 * 86_400
ATTEMPTS = 10


def root() -> pathlib.Path:
    """Return the folder that has a folder for each job of this user on this machine."""
    chosen = settings.debug_dir
    return pathlib.Path(chosen or pathlib.Path(tempfile.gettempdir()) / f"jdistgrad-debug-{os.getuid()}").absolute()


def of_this_process() -> tuple[pathlib.Path, str]:
    """Return the folder of this job, and what this process's files are called after."""
    if not launcher_env.launched() or launcher_env.place_taken_by() is not None:  # a rank may have started it
        return root() / f"process-{os.getpid()}", "process"
    return root() / job_name(os.environ, os.getppid()), f"rank{launcher_env.rank()}"


def job_name(environment: Mapping[str, str], launcher: int) -> str:
    """Return a name for a job that its ranks on one machine agree on, fit for a folder."""
    job = launcher_env.job_of(environment)
    return f"launcher-{launcher}" if job is None else re.sub(r"[^\w.@-]", "_", job)


def make(folder: pathlib.Path) -> None:
    """Make the folder of a job, which only this user can read. Raises OSError if it is another's."""
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (folder,) if settings.debug_dir else (folder.parent, folder):  # a folder that the user chose is trusted
        if one.lstat().st_uid != os.getuid():
            raise PermissionError(f"{one} belongs to another user")


def entered(folder: pathlib.Path, label: str) -> IO[str]:
    """Make the folder of a job, without an earlier process's files of this name; return the file for stacks, open."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # a rank that ended has just removed the folder
            make(folder)
            unlink(folder, label)
            return (folder / f"{label}{STACKS}").open("a", encoding="utf-8")
    raise FileNotFoundError(f"{folder} is removed each time it has been made")


def write(path: pathlib.Path, value: Any) -> None:
    """Write a file as a whole: a reader sees the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(json.dumps(value), encoding="utf-8")
    unfinished.replace(path)


def files_in(folder: pathlib.Path, kind: str) -> list[pathlib.Path]:
    """Return the processes' files of one kind: none where the last process has just removed the folder."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(folder.glob(f"*{kind}"))
    return []


def read(folder: pathlib.Path, kind: str) -> dict[str, Any]:
    """Return what the processes' files of one kind say, by what they are called after."""
    found = {}
    for path in files_in(folder, kind):
        with contextlib.suppress(OSError, ValueError):  # the process has just removed it
            found[path.name.removesuffix(kind)] = json.loads(path.read_text(encoding="utf-8"))
    return found


def changed(path: pathlib.Path) -> int:
    """Return when a file was last changed, in nanoseconds; 0 if there is none or it is empty."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_mtime_ns if status.st_size else 0


def read_processes(folder: pathlib.Path) -> dict[str, Any]:
    """Return the processes that have announced themselves, by what their files are called after."""
    found = read(folder, PROCESS)
    return {label: one for label, one in found.items() if isinstance(one, dict) and one.keys() >= NEEDED}


def remove_old(root: pathlib.Path, now: float) -> None:
    """Remove the folders of jobs that ended long ago and left what an error wrote, or were killed."""
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):  # another process removes the same
            old = folder.is_dir() and now - folder.stat().st_mtime > KEPT_SECONDS
            if old and not any(map(may_run, read_processes(folder).values())):
                shutil.rmtree(folder, ignore_errors=True)


def may_run(process: Mapping[str, Any]) -> bool:
    """Return whether a process runs, as far as is known here."""
    elsewhere = process["host"] != socket.gethostname()
    return elsewhere or processes.is_running(process["pid"], process["start"])


def ask(folder: pathlib.Path, how: str = ASKED) -> int:
    """Ask all processes of a job for new snapshots; return the time of asking, as ``changed`` does."""
    (folder / how).write_text("now", encoding="utf-8")
    return changed(folder / how)


def unlink(folder: pathlib.Path, label: str) -> None:
    """Remove the files of a process."""
    for kind in (PROCESS, WAITS, STACKS):
        (folder / f"{label}{kind}").unlink(missing_ok=True)


def remove(folder: pathlib.Path, label: str) -> None:
    """Remove the files of a process, and the folder after its last one."""
    unlink(folder, label)
    if not files_in(folder, PROCESS):
        for shared in (ASKED, TROUBLE):
            (folder / shared).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process has just come, or other files are in it
            folder.rmdir()
