"""MPI in this process: whether it can be used, how it ends a job, and what is to be done before it ends itself."""

import contextlib
import fcntl
import sys
import termios
import time
from typing import Any

from mpi4py import MPI

from jdistgrad import errors
from jdistgrad.wire import launcher_env
from jdistgrad.wire.transport import Task

READ_SECONDS = 5.0  # how long mpirun may take to read what was printed


def require_threads() -> None:
    """Raise WorldError if MPI was not started for use by several threads at once, or has been finalized."""
    if MPI.Is_finalized():
        raise errors.WorldError(
            "init: MPI.Finalize() has been called in this process, and MPI cannot start twice. Leave the call out: "
            "mpi4py finalizes MPI at the end of the process."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise errors.WorldError(
            "init: MPI runs with less than MPI_THREAD_MULTIPLE, which calls from several threads need. Import mpi4py "
            "with its defaults (mpi4py.rc.thread_level = 'multiple'), and use an MPI built with thread support."
        )


def why_alone() -> str:
    """Return why MPI finds this process alone, though its launcher has started several; "" if that is not so.

    MPI takes a process that a launcher of another kind has started for a job of its own, without an error.
    """
    variable, started = launcher_env.started_processes()
    if started == 1 or MPI.COMM_WORLD.size > 1:
        return ""
    library = MPI.Get_library_version().split(",")[0].strip(" \t\n\0")
    return (
        f"the launcher says that it has started {started} processes ({variable}), but MPI finds this one alone, and "
        f"each would be a world of its own. mpi4py uses {library}; the launcher is another MPI's, an srun that does "
        "not work with this MPI, or one that knows no MPI (torchrun)"
    )


def require_the_others(what: str) -> None:
    """Raise WorldError if MPI does not find the processes that were started with this one."""
    why = why_alone()
    if why:
        variable, _ = launcher_env.started_processes()
        raise errors.WorldError(
            f"{what}: {why}. To remedy this, {launcher_env.TOGETHER}; `jdistgrad doctor`, started the same way, tells "
            f"whether they meet. Processes that are meant to be alone need {variable} unset."
        )


def abort_job(cause: str) -> None:
    """End all ranks now, because this one cannot go on."""
    try:
        with contextlib.suppress(Exception):  # closed, or None
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print(f"jdistgrad: {cause}; ending the job", file=sys.stderr, flush=True)
            _wait_until_read(sys.stderr)
    finally:
        MPI.COMM_WORLD.Abort(1)


def _wait_until_read(stream: Any) -> None:
    """Wait until mpirun has read the stream: output it reads after the abort is printed below its own, or is lost."""
    deadline = time.monotonic() + READ_SECONDS
    with contextlib.suppress(OSError, ValueError):  # not a pipe
        while _unread(stream.fileno()) and time.monotonic() < deadline:
            time.sleep(0.01)
    time.sleep(0.1)  # mpirun needs time to pass the text on


def _unread(descriptor: int) -> int:
    """Return how many bytes wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def when_mpi_ends(task: Task) -> None:
    """Run a task at the beginning of ``MPI.Finalize``, where MPI deletes this attribute and can still be used."""
    key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: task())
    MPI.COMM_SELF.Set_attr(key, None)
