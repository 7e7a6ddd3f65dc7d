"""Detect the ranks of a communicator that have died, by ULFM (Open MPI 5, User-Level Failure Mitigation) and pidfds.

MPI learns of processes that were killed, on any machine, but not of a process that exited with a status other than 0.
The kernel reports both for ranks of one machine (``pidfd_open(2)``).
"""

import contextlib
import os
import pathlib
import select
import signal
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
OF_FAILURES = frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_IN_STATUS})

Process = tuple[str, int]  # the machine and the pid


def missing(*, started: bool) -> str:
    """Return why a job cannot go on without a rank that dies, and what to do; "" if it can.

    Arguments:
      started: ask for this job, as it was started, and not for any job of this MPI.
    """
    if not hasattr(MPI.Comm, "Get_failed") or "Open MPI v5" not in MPI.Get_library_version():
        return (
            "this MPI cannot go on without a rank that dies, which needs Open MPI 5 (with ULFM) and mpi4py 4.1. "
            "Leave survive out, or load such an MPI."
        )
    if started and os.environ.get(ENABLED, "0").lower() not in ("1", "true"):
        return (
            "this job was not started to go on without a rank that dies. Start it by `jdistgrad run --survive`, or by "
            "`mpirun --with-ft ulfm` (srun cannot do that)."
        )
    return ""


def this_process() -> Process:
    """Return an id of this process for other processes of this machine."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {pathlib.Path('/proc/self/ns/pid').readlink()}", os.getpid()
    except OSError:  # no Linux
        return "", os.getpid()


def is_failure(error: MPI.Exception) -> bool:
    """Return whether an error may come from the death of a rank."""
    return error.Get_error_class() in OF_FAILURES


def failed(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator that have died, as far as this MPI knows."""
    if not hasattr(comm, "Get_failed"):
        return []
    try:
        group: Any = comm.Get_failed()
    except (MPI.Exception, NotImplementedError):
        return []
    everybody = comm.Get_group()
    dead = sorted(MPI.Group.Translate_ranks(group, range(group.size), everybody))
    group.Free()
    everybody.Free()
    return dead


class Failures:
    """The search for ranks that have died. ``processes``: of all ranks."""

    def __init__(self, comm: MPI.Intracomm, processes: Sequence[Process]):
        self._comm, self._acknowledged = comm, 0
        self._found: set[int] = set()
        self._poll, self._watched = select.poll(), dict[int, int]()
        self._in_reach: set[int] = set()  # ranks of this machine
        self._gone: set[int] = set()  # ranks of this machine that have ended
        machine, own = processes[comm.rank]
        for rank, (other, number) in enumerate(processes):
            if machine and other == machine and number != own:
                try:
                    descriptor = os.pidfd_open(number)
                except ProcessLookupError:
                    self._gone.add(rank)
                except (OSError, AttributeError):  # an old kernel
                    pass
                else:
                    self._watched[descriptor] = rank
                    self._in_reach.add(rank)
                    self._poll.register(descriptor, select.POLLIN)

    def find(self) -> list[int]:
        """Return the ranks that have died since the last call, and acknowledge them, so that wildcards work again."""
        for descriptor, _ in self._poll.poll(0) if self._watched else []:
            self._poll.unregister(descriptor)
            self._gone.add(self._watched.pop(descriptor))
            os.close(descriptor)
        dead = failed(self._comm)
        if len(dead) > self._acknowledged:
            self._acknowledged = self._comm.Ack_failed(len(dead))
        new = (self._gone | set(dead)) - self._found
        self._found |= new
        return sorted(new)

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank, unless it has ended; return False if it is out of reach. Thread-safe."""
        for descriptor, watched in self._watched.copy().items():
            if watched == rank:
                with contextlib.suppress(OSError):  # ended meanwhile
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return rank in self._in_reach

    def close(self) -> None:
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        self._poll = select.poll()
