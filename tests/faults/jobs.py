"""Jobs that are struck, and what is left of them."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence

from torture import watching

import jdistgrad

MARK = "JDISTGRAD_FAULT"  # an environment variable: the processes of one job have a value of their own
TO_START = 60.0
TO_VANISH = 2.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job after its end.

    Attributes:
      status: its exit status; None if it stood still and was ended.
      seconds: from the strike to the end; None if no rank was struck.
      left: the processes that outlived it.
    """

    status: int | None
    output: str
    seconds: float | None
    left: Sequence[int]


def run(
    n: int, arguments: Sequence[str], *, limit: float, settings: Mapping[str, str], options: Sequence[str] = ()
) -> Ended:
    """Run a program on ``n`` ranks, of which one is struck; give it ``limit`` seconds from the strike on.

    Arguments:
      options: of `jdistgrad run`, beside the number of ranks.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        start = [sys.executable, "-m", "jdistgrad", "run", "-n", str(n), *options]
        command = [*start, *arguments, "--note", str(folder / "note")]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                command, env=environment(mark, settings), stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = watch(job, folder / "note", limit)
                ended, struck = time.time(), moment(folder / "note")
                left = outlived(mark) if status is not None else []
            finally:
                watching.end(job)
                end_all(mark)
        text = (folder / "output").read_text(errors="replace")
        return Ended(status, text, None if struck is None else ended - struck, left)


def environment(mark: str, settings: Mapping[str, str]) -> dict[str, str]:
    here = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(jdistgrad.__file__).parents[1])]
    path = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, MARK: mark, **settings}


def watch(job: subprocess.Popen, note: pathlib.Path, limit: float) -> int | None:
    """Wait for a job. Return its exit status, or None if it stands still."""
    started = time.time()
    while time.time() - (moment(note) or started + TO_START) < limit:
        status = job.poll()
        if status is not None:
            return status
        time.sleep(0.02)
    return None


def moment(note: pathlib.Path) -> float | None:
    """Return when a rank was struck."""
    with contextlib.suppress(FileNotFoundError):
        return note.stat().st_mtime
    return None


def outlived(mark: str) -> list[int]:
    """Return the processes of a job that do not vanish soon after it."""
    deadline = time.monotonic() + TO_VANISH
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def processes(mark: str, only: bytes = b"") -> list[int]:
    """Return the processes of a job whose command lines contain some bytes."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0") and only in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def send(mark: str, number: int, only: bytes = b"") -> None:
    """Send a signal to a job's processes."""
    for process in processes(mark, only):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def end_all(mark: str) -> None:
    send(mark, signal.SIGKILL)
