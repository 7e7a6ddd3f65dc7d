"""How the ranks of an MPI job meet: without a collective that would hang for ever where one of them is missing.

Rank 0 collects everybody's hello and tells everybody all of them, or who did not come. Only then is the communicator
duplicated: everybody is known to be there.
"""

from typing import Any

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire.polling import poll

ROLL_TAG, ROSTER_TAG = 31_071, 31_072
GRACE_SECONDS = 5.0  # the others wait a little longer than rank 0, whose answer names who is missing


def gather(comm: MPI.Intracomm, hello: Any, timeout: float) -> list[Any]:
    """Everybody's hello, by rank. Every rank must call it.

    Raises:
      WorldError: on every rank that called: who was missing after ``timeout`` seconds.
    """
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
    """A communicator of our own. Every rank must call it."""
    twin, request = comm.Idup()
    if not poll(request.Test, timeout):
        raise WorldError(f"init: MPI could not duplicate the communicator within {timeout:g} s")
    return twin


def _collect(comm: MPI.Intracomm, hello: Any, timeout: float) -> dict[int, Any]:
    hellos = {0: hello}

    def all_here() -> bool:
        status = MPI.Status()
        while (message := comm.improbe(tag=ROLL_TAG, status=status)) is not None:
            hellos[status.source] = message.recv()
        return len(hellos) == comm.size

    poll(all_here, timeout)
    answers = [comm.isend(hellos, rank, ROSTER_TAG) for rank in hellos if rank != 0]
    poll(lambda: MPI.Request.Testall(answers), GRACE_SECONDS)
    return hellos


def _report(comm: MPI.Intracomm, hello: Any, timeout: float) -> dict[int, Any]:
    sent = comm.isend(hello, 0, ROLL_TAG)
    if not poll(lambda: comm.iprobe(0, ROSTER_TAG), timeout + GRACE_SECONDS):
        return dict.fromkeys(range(1, comm.size), hello)
    roster = comm.recv(source=0, tag=ROSTER_TAG)
    sent.wait()
    return roster
