"""The meeting of the ranks of an MPI job, without a collective, which would hang for ever if a rank were missing.

Rank 0 collects the hellos of all ranks and sends to each rank all those that came. Only then, with all ranks known to
be there, is the communicator duplicated. A hello holds only numbers, strings, and containers of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire import mpi_failures, plain
from jdistgrad.wire.polling import poll

ROLL_TAG, ROSTER_TAG, END_TAG = 31_071, 31_072, 31_073
GRACE_SECONDS = 5.0  # the others wait a little longer than rank 0, whose answer tells which ranks are missing


def gather(comm: MPI.Intracomm, hello: Any, timeout: float) -> list[Any]:
    """Return the hellos of all ranks, by rank. Every rank must call it.

    Raises:
      WorldError: some ranks were missing after ``timeout`` seconds; raised on every rank that called.
    """
    with naming_the_dead(comm):
        hellos = _collect(comm, hello, timeout) if comm.rank == 0 else _report(comm, hello, timeout)
    missing = sorted(set(range(comm.size)) - set(hellos))
    if missing:
        raise WorldError(
            f"init: ranks {missing} of {comm.size} did not call init within {timeout:g} s. "
            "Every rank must call jdistgrad.init().",
            missing=missing,
        )
    return [hellos[rank] for rank in range(comm.size)]


def duplicate(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    """Return a communicator of our own. Every rank must call it."""
    with naming_the_dead(comm):
        twin, request = comm.Idup()
        if not poll(request.Test, timeout):
            raise WorldError(f"init: MPI could not duplicate the communicator within {timeout:g} s")
        return twin


def missing_at_the_end(comm: MPI.Intracomm, timeout: float) -> list[int]:
    """Return the ranks that do not call this within ``timeout`` seconds. To be called once, at the end of a program."""
    others = set(range(comm.size)) - {comm.rank}
    sent = [comm.Isend([bytearray(), MPI.BYTE], rank, END_TAG) for rank in others]

    def all_here() -> bool:
        status = MPI.Status()
        while (message := comm.Improbe(tag=END_TAG, status=status)) is not None:
            message.Recv([bytearray(), MPI.BYTE])
            others.discard(status.source)
        return not others

    poll(all_here, timeout)
    poll(lambda: MPI.Request.Testall(sent), 0.0 if others else timeout)
    return sorted(others)


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


def _collect(comm: MPI.Intracomm, hello: Any, timeout: float) -> dict[int, Any]:
    hellos = {0: hello}

    def all_here() -> bool:
        status = MPI.Status()
        while (message := comm.Improbe(tag=ROLL_TAG, status=status)) is not None:
            hellos[status.source] = _received(message, status)
        return len(hellos) == comm.size

    poll(all_here, timeout)
    roster = plain.pack(hellos)
    answers = [comm.Isend([roster, MPI.BYTE], rank, ROSTER_TAG) for rank in hellos if rank != 0]
    poll(lambda: MPI.Request.Testall(answers), GRACE_SECONDS)
    return hellos


def _report(comm: MPI.Intracomm, hello: Any, timeout: float) -> dict[int, Any]:
    sent = comm.Isend([plain.pack(hello), MPI.BYTE], 0, ROLL_TAG)
    if not poll(lambda: comm.Iprobe(0, ROSTER_TAG), timeout + GRACE_SECONDS):
        return dict.fromkeys(range(1, comm.size), hello)
    status = MPI.Status()
    roster: dict[int, Any] = _received(comm.Mprobe(0, ROSTER_TAG, status), status)
    sent.Wait()
    return roster


def _received(message: MPI.Message, status: MPI.Status) -> Any:
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([data, MPI.BYTE])
    return plain.unpack(data)
