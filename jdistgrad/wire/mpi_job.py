"""The ranks of an MPI job, as worlds need them: who there is, how they connect, who has died, and how all end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire import mpi_failures, mpi_process
from jdistgrad.wire.doorbell import Doorbell
from jdistgrad.wire.memory import SharedMemory
from jdistgrad.wire.mpi import MPITransport, free_left, worlds_left
from jdistgrad.wire.transport import Transport


class Offer(NamedTuple):
    """What other ranks need to connect to one.

    Attributes:
      memory: the address of its shared memory; ``doorbell``: that of its doorbell.
      process: its process, as its neighbours name it; None unless the others survive it.
      left: the worlds that it has left whose communicators it has kept.
    """

    memory: str
    doorbell: str
    process: mpi_failures.Process | None
    left: tuple[str, ...]


class MPIJob:
    """The job that this process is a rank of. MPI has been started.

    Raises:
      WorldError: MPI is not safe for threads, or finds this process alone, or cannot go on without a rank that dies.
    """

    def __init__(self, *, survive: bool):
        mpi_process.require_threads()
        mpi_process.require_the_others("init")
        why = mpi_failures.missing(started=True) if survive else ""
        if why:
            raise WorldError(f"init(survive=True): {why}")
        self._comm, self._survive = MPI.COMM_WORLD, survive
        self.rank, self.size = self._comm.rank, self._comm.size
        self._memory: SharedMemory | None = None
        self._doorbell: Doorbell | None = None

    def offer(self) -> Offer:
        self._memory = SharedMemory()
        self._doorbell = Doorbell(self._memory)
        process = mpi_failures.this_process() if self._survive else None
        return Offer(self._memory.address, self._doorbell.address, process, tuple(worlds_left))

    def withdraw(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
        if self._memory is not None:
            self._memory.close()

    def gather(self, hello: Any, timeout: float) -> list[Any]:
        return mpi_process.gather(self._comm, hello, timeout)

    def connect(self, world: str, offers: Sequence[Any], timeout: float) -> Transport:
        memory, doorbell, found = self._memory, self._doorbell, [Offer(*one) for one in offers]
        assert memory is not None
        assert doorbell is not None
        free_left([one.left for one in found])
        own = mpi_process.duplicate(self._comm, timeout)
        failures = None
        if self._survive:
            failures = mpi_failures.Failures(own, [one.process for one in found if one.process is not None])
        memory.meet([one.memory for one in found], self.rank)
        doorbell.meet([one.doorbell for one in found])
        return MPITransport(own, world, memory, doorbell, failures)

    def dead(self) -> set[int]:
        MPI.COMM_SELF.Iprobe()  # lets MPI learn of deaths
        return set(mpi_failures.failed(self._comm))

    def end(self, cause: str) -> None:
        mpi_process.abort_job(cause)
