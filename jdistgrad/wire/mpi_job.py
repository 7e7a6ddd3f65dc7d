"""The MPI job that this process is a rank of: how its ranks meet and connect, which have died, and how it ends.

Ranks meet without a collective, which would hang for ever if a rank were missing. Rank 0 collects the hellos of all
ranks, and sends each rank the list. Only then, with all ranks known to be there, is the communicator duplicated.
"""

import contextlib
import fcntl
import pickle
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from jdistgrad.errors import WorldError
from jdistgrad.wire import launcher_env, mpi_failures
from jdistgrad.wire.doorbell import Doorbell
from jdistgrad.wire.memory import SharedMemory
from jdistgrad.wire.mpi_transport import MPITransport
from jdistgrad.wire.polling import poll
from jdistgrad.wire.transport import Transport

WORLD, SUM = MPI.COMM_WORLD, MPI.SUM
READ_SECONDS = 5.0  # how long mpirun may take to read what was printed
HELLO_TAG, HELLOS_TAG, END_TAG = 31_071, 31_072, 31_073
HERE = pickle.dumps(None)  # what a rank sends at its end, from memory that stays
GRACE_SECONDS = 5.0  # the others wait a little longer than rank 0, whose answer names the missing ranks

# What other ranks need to connect to one: the addresses of its shared memory and of its doorbell; its process, as its
# neighbours name it, None unless the others survive it.
Offer = tuple[str, str, mpi_failures.Process | None]


class MPIJob:
    """The job that this process is a rank of, as worlds need it: to open, and to end. MPI has been started.

    Raises:
      WorldError: MPI is not thread-safe, or finds this process alone, or cannot go on without a rank that dies.
    """

    def __init__(self, *, survive: bool):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError(
                "init: MPI runs with less than MPI_THREAD_MULTIPLE, which calls from several threads need. Import "
                "mpi4py with its defaults (mpi4py.rc.thread_level = 'multiple'), and use an MPI built with thread "
                "support."
            )
        why = why_alone()
        if why:
            variable, _ = launcher_env.started_processes()
            raise WorldError(
                f"init: {why}. To remedy this, {launcher_env.TOGETHER}; `jdistgrad doctor`, started the same way, "
                f"checks whether they meet. For processes that are meant to be alone, unset {variable}."
            )
        why = mpi_failures.missing(started=True) if survive else ""
        if why:
            raise WorldError(f"init(survive=True): {why}")
        self._survive, self.rank, self.size = survive, WORLD.rank, WORLD.size
        self._memory: SharedMemory | None = None
        self._doorbell: Doorbell | None = None

    def offer(self) -> Offer:
        """Return what the other ranks need to connect to this one, for its hello."""
        self._memory = SharedMemory()
        self._doorbell = Doorbell(self._memory)
        process = mpi_failures.this_process() if self._survive else None
        return self._memory.address, self._doorbell.address, process

    def withdraw(self) -> None:
        """Undo ``offer``: the world does not open."""
        for one in (self._doorbell, self._memory):
            if one is not None:
                one.close()

    def gather(self, hello: Any, timeout: float) -> list[Any]:
        """Return the hellos of all ranks, by rank. Every rank must call it.

        Raises:
          WorldError: some ranks were missing after ``timeout`` seconds; raised on every rank that called.
        """
        with _naming_the_dead():
            if self.rank == 0:
                hellos = _received_from_all({0: hello}, HELLO_TAG, timeout)
                answer = pickle.dumps(hellos)
                answers = [WORLD.Isend([answer, MPI.BYTE], rank, HELLOS_TAG) for rank in hellos if rank != 0]
                poll(lambda: MPI.Request.Testall(answers), GRACE_SECONDS)
            else:
                sent, hellos = (
                    WORLD.Isend([pickle.dumps(hello), MPI.BYTE], 0, HELLO_TAG),
                    dict.fromkeys(range(1, self.size)),
                )
                if poll(lambda: WORLD.Iprobe(0, HELLOS_TAG), timeout + GRACE_SECONDS):  # else rank 0 is missing
                    status = MPI.Status()
                    hellos = _received(WORLD.Mprobe(0, HELLOS_TAG, status), status)
                    sent.Wait()
        missing = sorted(set(range(self.size)) - set(hellos))
        if missing:
            raise WorldError(
                f"init: ranks {missing} of {self.size} did not call init within {timeout:g} s. "
                "Every rank must call jdistgrad.init().",
                missing=missing,
            )
        return [hellos[rank] for rank in range(self.size)]

    def connect(self, offers: Sequence[Any], timeout: float) -> Transport:
        """Return a transport between all ranks, with their offers by rank. Every rank must call it."""
        memory, doorbell = self._memory, self._doorbell
        assert memory is not None
        assert doorbell is not None
        memories, doorbells, processes = zip(*offers, strict=True)
        with _naming_the_dead():
            own, request = WORLD.Idup()
            if not poll(request.Test, timeout):
                raise WorldError(f"init: MPI could not duplicate the communicator within {timeout:g} s")
        failures = mpi_failures.Failures(own, processes) if self._survive else None
        memory.meet(memories, self.rank)
        doorbell.meet(doorbells)
        return MPITransport(own, memory, doorbell, failures)

    def dead(self) -> set[int]:
        """Return the ranks that are known to have died."""
        MPI.COMM_SELF.Iprobe()  # lets MPI learn of deaths
        return set(mpi_failures.failed(WORLD))

    @staticmethod
    def end(cause: str) -> None:
        """End all ranks now, because this one cannot go on."""
        try:
            with contextlib.suppress(Exception):  # closed, or None
                sys.stdout.flush()
            with contextlib.suppress(Exception):
                print(f"jdistgrad: {cause}; ending the job", file=sys.stderr, flush=True)
                # What mpirun reads from a pipe only after the abort is printed below its own words, or is lost.
                deadline = time.monotonic() + READ_SECONDS
                while any(fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
                    time.sleep(0.01)
            time.sleep(0.1)  # mpirun needs time to pass the text on
        finally:
            WORLD.Abort(1)


def why_alone() -> str:
    """Return why MPI finds this process alone, though its launcher has started several; "" if that is not so.

    MPI takes a process that a launcher of another kind has started for a job of its own, without an error.
    """
    variable, started = launcher_env.started_processes()
    if started == 1 or WORLD.size > 1:
        return ""
    return (
        f"the launcher says that it has started {started} processes ({variable}), but MPI finds this one alone, and "
        f"each would be a world of its own. mpi4py uses {_library()}; the launcher is another MPI's, an srun that does "
        "not work with this MPI, or one that knows no MPI (torchrun)"
    )


def _library() -> str:
    return MPI.Get_library_version().split("\0")[0].splitlines()[0].split(",")[0].strip()


def facts() -> dict[str, Any]:
    """Return facts about the MPI of this process, for reports."""
    return {
        "library": _library(),
        "threads": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        "rank": WORLD.rank,
        "size": WORLD.size,
        "cannot_survive": mpi_failures.missing(started=False),
        "why_alone": why_alone(),
    }


@contextlib.contextmanager
def _naming_the_dead() -> Iterator[None]:
    """Name the dead ranks in errors of MPI that come from their death."""
    try:
        yield
    except MPI.Exception as error:
        dead = mpi_failures.failed(WORLD)
        if not dead:
            raise
        raise WorldError(
            f"init: ranks {dead} of {WORLD.size} have died or ended. A world may go on without ranks, but opens only "
            "with all ranks of the job: start the job again.",
            missing=dead,
        ) from error


def _received_from_all(received: dict[int, Any], tag: int, timeout: float) -> dict[int, Any]:
    """Return the objects that the ranks send under a tag, by rank, once all are here or the timeout has passed."""

    def all_here() -> bool:
        status = MPI.Status()
        while (message := WORLD.Improbe(tag=tag, status=status)) is not None:
            received[status.source] = _received(message, status)
        return len(received) == WORLD.size

    poll(all_here, timeout)
    return received


def _received(message: MPI.Message, status: MPI.Status) -> Any:
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([data, MPI.BYTE])
    return pickle.loads(data)


def missing_at_the_end(timeout: float) -> list[int]:
    """Return the ranks that do not call this within ``timeout`` seconds. Call it once, at the end of a program."""
    everybody = set(range(WORLD.size))
    sent = [WORLD.Isend([HERE, MPI.BYTE], rank, END_TAG) for rank in everybody - {WORLD.rank}]
    missing = everybody - set(_received_from_all({WORLD.rank: None}, END_TAG, timeout))
    poll(lambda: MPI.Request.Testall(sent), 0.0 if missing else timeout)
    return sorted(missing)
