"""The ranks of an MPI job, as worlds need them: who there is, how they connect, who has died, and how all end."""

import functools
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire import mpi_failures, mpi_process
from jdistgrad.wire.doorbell import Doorbell
from jdistgrad.wire.memory import SharedMemory
from jdistgrad.wire.mpi_transport import MPITransport, free_left, worlds_left
from jdistgrad.wire.transport import Transport

# What other ranks need to connect to one: the addresses of its shared memory and of its doorbell; its process, as its
# neighbours name it, None unless the others survive it; the worlds that it has left whose communicators it has kept.
Offer = tuple[str, str, mpi_failures.Process | None, tuple[str, ...]]


class MPIJob:
    """The job that this process is a rank of, as worlds need it: to open, and to end. MPI has been started.

    Attributes:
      gather: returns the hellos of all ranks, by rank: see ``mpi_process``.

    Raises:
      WorldError: MPI is not safe for threads, or finds this process alone, or cannot go on without a rank that dies.
    """

    def __init__(self, *, survive: bool):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError(
                "init: MPI runs with less than MPI_THREAD_MULTIPLE, which calls from several threads need. Import "
                "mpi4py with its defaults (mpi4py.rc.thread_level = 'multiple'), and use an MPI built with thread "
                "support."
            )
        mpi_process.require_the_others("init")
        why = mpi_failures.missing(started=True) if survive else ""
        if why:
            raise WorldError(f"init(survive=True): {why}")
        self._comm, self._survive = MPI.COMM_WORLD, survive
        self.rank, self.size = self._comm.rank, self._comm.size
        self.gather = functools.partial(mpi_process.gather, self._comm)
        self._memory: SharedMemory | None = None
        self._doorbell: Doorbell | None = None

    def offer(self) -> Offer:
        """Return what the other ranks need to connect to this one, for its hello."""
        self._memory = SharedMemory()
        self._doorbell = Doorbell(self._memory)
        process = mpi_failures.this_process() if self._survive else None
        return self._memory.address, self._doorbell.address, process, tuple(worlds_left)

    def withdraw(self) -> None:
        """Undo ``offer``: the world does not open."""
        if self._doorbell is not None:
            self._doorbell.close()
        if self._memory is not None:
            self._memory.close()

    def connect(self, world: str, offers: Sequence[Any], timeout: float) -> Transport:
        """Return a transport between all ranks, with their offers by rank. Every rank must call it."""
        memory, doorbell = self._memory, self._doorbell
        assert memory is not None
        assert doorbell is not None
        memories, doorbells, processes, left = zip(*offers, strict=True)
        free_left(left)
        own = mpi_process.duplicate(self._comm, timeout)
        failures = mpi_failures.Failures(own, processes) if self._survive else None
        memory.meet(memories, self.rank)
        doorbell.meet(doorbells)
        return MPITransport(own, world, memory, doorbell, failures)

    def dead(self) -> set[int]:
        """Return the ranks that are known to have died."""
        MPI.COMM_SELF.Iprobe()  # lets MPI learn of deaths
        return set(mpi_failures.failed(self._comm))

    end = staticmethod(mpi_process.abort_job)
