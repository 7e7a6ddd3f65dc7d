"""MPI in this process: whether it can be used, how the ranks of a job meet, and how a process ends the job.

Ranks meet without a collective, which would hang for ever if a rank were missing. Rank 0 collects the hellos of all
ranks and sends to each rank all those that came. Only then, with all ranks known to be there, is the communicator
duplicated.
"""

import contextlib
import fcntl
import pickle
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire import launcher_env, mpi_failures
from jdistgrad.wire.polling import poll

WORLD, SUM = MPI.COMM_WORLD, MPI.SUM
CHUNK = 1 << 30  # bytes: more than this overflows the int that MPI counts with
READ_SECONDS = 5.0  # how long mpirun may take to read what was printed
ROLL_TAG, ROSTER_TAG, END_TAG = 31_071, 31_072, 31_073
HERE = pickle.dumps(None)  # what a rank sends at its end, from memory that stays
GRACE_SECONDS = 5.0  # the others wait a little longer than rank 0, whose answer tells which ranks are missing


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


def facts() -> dict[str, Any]:
    """Return what there is to say about the MPI of this process, for reports."""
    return {
        "library": MPI.Get_library_version().split("\x00")[0].splitlines()[0].split(",")[0].strip(),
        "threads": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        "rank": WORLD.rank,
        "size": WORLD.size,
        "cannot_survive": mpi_failures.missing(started=False),
        "why_alone": why_alone(),
    }


def require_the_others(what: str) -> None:
    """Raise WorldError if MPI does not find the processes that were started with this one."""
    why = why_alone()
    if why:
        variable, _ = launcher_env.started_processes()
        raise WorldError(
            f"{what}: {why}. To remedy this, {launcher_env.TOGETHER}; `jdistgrad doctor`, started the same way, tells "
            f"whether they meet. Processes that are meant to be alone need {variable} unset."
        )


def gather(comm: MPI.Intracomm, hello: Any, timeout: float) -> list[Any]:
    """Return the hellos of all ranks, by rank. Every rank must call it.

    Raises:
      WorldError: some ranks were missing after ``timeout`` seconds; raised on every rank that called.
    """
    with naming_the_dead(comm):
        if comm.rank == 0:
            hellos = _heard(comm, {0: hello}, ROLL_TAG, timeout)
            roster = pickle.dumps(hellos)
            answers = [comm.Isend([roster, MPI.BYTE], rank, ROSTER_TAG) for rank in hellos if rank != 0]
            poll(lambda: MPI.Request.Testall(answers), GRACE_SECONDS)
        else:
            sent, hellos = comm.Isend([pickle.dumps(hello), MPI.BYTE], 0, ROLL_TAG), dict.fromkeys(range(1, comm.size))
            if poll(lambda: comm.Iprobe(0, ROSTER_TAG), timeout + GRACE_SECONDS):  # else rank 0 is missing
                status = MPI.Status()
                hellos = _received(comm.Mprobe(0, ROSTER_TAG, status), status)
                sent.Wait()
    missing = sorted(set(range(comm.size)) - set(hellos))
    if missing:
        raise WorldError(
            f"init: ranks {missing} of {comm.size} did not call init within {timeout:g} s. "
            "Every rank must call jdistgrad.init().",
            missing=missing,
        )
    return [hellos[rank] for rank in range(comm.size)]


def _heard(comm: MPI.Intracomm, heard: dict[int, Any], tag: int, timeout: float) -> dict[int, Any]:
    """Return what the ranks say under a tag, by rank, once all have said something or the timeout has passed."""

    def all_here() -> bool:
        status = MPI.Status()
        while (message := comm.Improbe(tag=tag, status=status)) is not None:
            heard[status.source] = _received(message, status)
        return len(heard) == comm.size

    poll(all_here, timeout)
    return heard


def _received(message: MPI.Message, status: MPI.Status) -> Any:
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([data, MPI.BYTE])
    return pickle.loads(data)


def duplicate(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    """Return a communicator of our own. Every rank must call it."""
    with naming_the_dead(comm):
        twin, request = comm.Idup()
        if not poll(request.Test, timeout):
            raise WorldError(f"init: MPI could not duplicate the communicator within {timeout:g} s")
        return twin


@contextlib.contextmanager
def naming_the_dead(comm: MPI.Intracomm) -> Iterator[None]:
    """Let errors of MPI in the block that come from the death of ranks name these."""
    try:
        yield
    except MPI.Exception as error:
        dead = mpi_failures.failed(comm)
        if not dead:
            raise
        raise WorldError(
            f"init: ranks {dead} of {comm.size} have died or ended. A world may go on without ranks, but it opens only "
            "with all ranks of the job: start the job again.",
            missing=dead,
        ) from error


def missing_at_the_end(comm: MPI.Intracomm, timeout: float) -> list[int]:
    """Return the ranks that do not call this within ``timeout`` seconds. To be called once, at the end of a program."""
    everybody = set(range(comm.size))
    sent = [comm.Isend([HERE, MPI.BYTE], rank, END_TAG) for rank in everybody - {comm.rank}]
    missing = everybody - set(_heard(comm, {comm.rank: None}, END_TAG, timeout))
    poll(lambda: MPI.Request.Testall(sent), 0.0 if missing else timeout)
    return sorted(missing)


def chunks(piece: Any) -> list[memoryview]:
    """Return the parts in which MPI, which counts bytes in C ints, sends a piece of any length."""
    view = memoryview(piece)
    return [view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK)]


def abort_job(cause: str) -> None:
    """End all ranks now, because this one cannot go on."""
    try:
        with contextlib.suppress(Exception):  # closed, or None
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            print(f"jdistgrad: {cause}; ending the job", file=sys.stderr, flush=True)
            # What mpirun reads of a pipe only after the abort is printed below its own words, or is lost.
            deadline = time.monotonic() + READ_SECONDS
            while any(fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(0.1)  # mpirun needs time to pass the text on
    finally:
        MPI.COMM_WORLD.Abort(1)
