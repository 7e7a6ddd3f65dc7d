"""Collectives over an MPI communicator: mpi4py on host memory; mpi4jax, where it is installed, inside jit."""

import contextlib
import copy
import functools
import importlib.util
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from jdistgrad.data_parallel.buckets.host_arrays import empty
from jdistgrad.data_parallel.collectives import communicators
from jdistgrad.data_parallel.collectives.base import Op
from jdistgrad.data_parallel.collectives.communicators import MPIPost
from jdistgrad.data_parallel.collectives.host import COMBINE, TIMEOUT, HostCollectives, combined
from jdistgrad.data_parallel.collectives.primitive import Route
from jdistgrad.data_parallel.collectives.roll_call import Meeting, missing_ranks, waits_no_longer
from jdistgrad.data_parallel.collectives.world import FOR_ANY_WORLD, CollectiveEntry, WatchedBlock, raise_lost
from jdistgrad.errors import CollectiveError, WorkerLostError
from jdistgrad.ffi.lowering import on_cpus
from jdistgrad.rpc.serving.failures import in_short
from jdistgrad.rpc.worker import find_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.arrays import ALIAS_FROM, EXTENSIONS_FROM
from jdistgrad.wire.polling import poll

CHUNK = 1 << 29  # bytes: MPI counts are C ints, and a gather multiplies them by the number of ranks
SUMMED = 2 << 20  # bytes, see ``sum_blocks``
HERE_TAG, ROUTE_TAG, OBJECTS_TAG = 31_073, 31_074, 31_075
GRACE_SECONDS = 3.0
AT_ONCE = 100e-6  # seconds
UNDER_WAY_SECONDS = 0.1  # what a lost worker has sent may still come


class MPI(HostCollectives):
    """Collectives over a duplicate of an MPI communicator. Every rank of the communicator must make one.

    On CPUs where mpi4jax is installed, compiled programs reduce through it, without calling Python for each operation.

    Arguments:
      comm: an mpi4py communicator; default ``MPI.COMM_WORLD``, which is refused where the workers are threads.
      on_device: reduce arrays where they lie, by mpi4jax in compiled programs, steps of ``DataParallel`` and operations
        called from Python included. On GPUs the MPI must take pointers to their memory: that is tried, in a process of
        its own, and refused with the reason. Otherwise arrays of GPUs go through pinned host memory.
      timeout: seconds to wait for the slowest rank, in the making and later.
    """

    world_ranks: tuple[int, ...]
    kind_in_programs: "ClassVar[type[MPI]]"  # set by mpi_in_programs, which needs this class
    kind_on_device: "ClassVar[type[MPI]]"  # the same, by mpi_on_device

    def __new__(cls, comm: Any = None, *, on_device: bool = False, timeout: float = TIMEOUT) -> "MPI":
        if cls is MPI and on_device:
            return object.__new__(cls.kind_on_device)
        return object.__new__(cls.kind_in_programs if cls is MPI and on_cpus() and has_mpi4jax() else cls)

    def __init__(self, comm: Any = None, *, on_device: bool = False, timeout: float = TIMEOUT):
        launcher_env.refuse_place_of_another_process("collectives.MPI")
        try:
            from mpi4py import MPI as mpi  # noqa: N811
        except ImportError as error:
            raise CollectiveError(
                f"MPI: {error}. Collectives over MPI need mpi4py (pip install 'jdistgrad[mpi]') and an MPI; workers as "
                "threads need neither (jdistgrad.collectives.Local)."
            ) from error
        from jdistgrad.wire.mpi_process import require_the_others

        if comm is None:
            worker = find_worker()
            if mpi.COMM_WORLD.size == 1 and worker is not None and worker.shares_process and worker.size > 1:
                raise CollectiveError(
                    f"collectives of processes, made by {worker.info}: the {worker.size} workers of this world are "
                    "threads of one process, which is one rank of MPI, so each of them would reduce alone. "
                    f"{FOR_ANY_WORLD}"
                )
            require_the_others("collectives.MPI")
        whole: Any = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(whole, mpi.Comm) or whole == mpi.COMM_NULL or whole.Is_inter():
            raise CollectiveError(
                f"MPI: comm must be an intracommunicator this rank belongs to, not {comm!r}. Ranks outside a group "
                "(MPI.COMM_NULL) take no part in its collectives."
            )
        self.rank, self.size, self.timeout = whole.rank, whole.size, timeout
        self.world_ranks = tuple(mpi.Group.Translate_ranks(whole.group, range(self.size), mpi.COMM_WORLD.group))
        self.comm, self._name = communicators.duplicate(whole, self.world_ranks, self.timeout)
        with communicators.naming_lost(self.world_ranks):
            self.has_room = communicators.has_room(communicators.neighbours_cores(self.comm), self.size)
        self._of_programs = self.duplicate()

    def duplicate(self) -> "MPI":
        """Return the same ranks over another communicator. Every rank must call it."""
        other = copy.copy(self)
        other.comm, other._name = communicators.duplicate(self.comm, self.world_ranks, self.timeout, self._name)
        other.turn, other.refusal, other._beside, other._pairs = 0, None, None, None
        return other

    def __repr__(self) -> str:
        return f"MPI(rank={self.rank}, size={self.size})"

    def twin(self) -> "MPI":
        other = self.duplicate()
        other._of_programs = other.duplicate()
        return other

    def of_programs(self) -> "MPI":
        """Return the same ranks over a communicator of their own: compiled programs run beside Python's operations."""
        return self._of_programs

    def announce(self, word: bytes, what: str) -> Meeting:
        from mpi4py import MPI as mpi  # noqa: N811

        everybody = bytearray(len(word) * self.size)
        try:
            request = self.comm.Iallgather(word, everybody)
            communicators.keep(request, word, everybody)
            together = self._together(what, blocking=False)
        except Exception as error:
            self._raise_lost(error, what)
            raise

        def has_ended() -> bool:
            try:
                return bool(request.Test())
            except Exception as error:
                self._raise_lost(error, what)
                raise

        def wait(timeout: float) -> list[bytes]:
            if not has_ended():
                self._wait_for(has_ended, what, timeout, together)
            communicators.let_go(request)
            status = mpi.Status()
            with contextlib.suppress(mpi.Exception):  # of a rank that is lost: what follows finds out
                if self.comm.Iprobe(mpi.ANY_SOURCE, HERE_TAG, status):  # a rank that takes no part in what follows
                    raise waits_no_longer(what, status.source, timeout)
            return [bytes(everybody[k : k + len(word)]) for k in range(0, len(everybody), len(word))]

        return Meeting(wait, has_ended)

    def _raise_lost(self, error: Exception, what: str) -> None:
        """Raise WorkerLostError if an error of MPI comes from the loss of a worker; else return."""
        raise_lost(error, self.world_ranks, what)

    def _wait_for(self, has_ended: Callable[[], bool], what: str, timeout: float, together: WatchedBlock) -> None:
        def check() -> None:
            try:
                together.check()
            except WorkerLostError:  # perhaps the lost worker has taken part
                if not poll(has_ended, UNDER_WAY_SECONDS):
                    raise

        with together:
            if not poll(has_ended, timeout, check):
                missing = self._missing()
                raise missing_ranks(what, missing, timeout, together.places(missing))

    def _together(self, what: str, *, blocking: bool = True, may_leave: bool = False) -> WatchedBlock:
        self.turn += 1
        entry = CollectiveEntry(what, self._name, self.turn, may_leave)
        return WatchedBlock(find_worker(), entry, self.world_ranks, blocking=blocking)

    def _missing(self) -> list[int]:
        """Return the ranks that do not wait here: ranks that give up tell the others, and the rest are missing."""
        from mpi4py import MPI as mpi  # noqa: N811

        others = set(range(self.size)) - {self.rank}
        for rank in others:
            self.comm.Isend(b"", rank, HERE_TAG)
        heard: set[int] = set()

        def all_heard() -> bool:
            status = mpi.Status()
            while (found := self.comm.Improbe(mpi.ANY_SOURCE, HERE_TAG, status)) is not None:
                found.Recv(bytearray())
                heard.add(status.source)
            return heard == others

        poll(all_heard, GRACE_SECONDS)
        return sorted(others - heard)

    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        flat, kind, operation = _as_mpi(memory.reshape(-1), op)
        step = max(1, CHUNK // flat.itemsize)
        with self._together(f"a {op} of {memory.nbytes} bytes"):
            for start in range(0, flat.size if self.size > 1 else 0, step):
                self.comm.Allreduce(mpi.IN_PLACE, [flat[start : start + step], kind], operation)

    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        octets = memory.reshape(-1).view(np.uint8)
        with self._together(f"a broadcast of {memory.nbytes} bytes"):
            for start in range(0, octets.size, CHUNK):
                self.comm.Bcast(octets[start : start + CHUNK], root)

    def gather_arrays(self, memory: np.ndarray) -> np.ndarray:
        octets = np.ascontiguousarray(memory).reshape(-1).view(np.uint8)
        everybody = empty((self.size, octets.size), np.uint8)
        step = max(1, CHUNK // self.size)
        with self._together(f"a gather of {memory.nbytes} bytes"):
            for start in range(0, octets.size, step):
                part = octets[start : start + step]
                received = np.empty((self.size, part.size), np.uint8)
                self.comm.Allgather(part, received)
                everybody[:, start : start + step] = received
        return everybody.reshape(-1).view(memory.dtype).reshape(self.size, *memory.shape)

    def exchange_blocks(self, memory: np.ndarray) -> np.ndarray:
        octets = memory.reshape(self.size, -1).view(np.uint8)
        received = np.empty_like(octets)
        step = max(1, CHUNK // self.size)
        with self._together(f"an exchange of blocks of {memory.nbytes} bytes"):
            for start in range(0, octets.shape[1], step):
                part = np.ascontiguousarray(octets[:, start : start + step])
                arrived = np.empty_like(part)
                self.comm.Alltoall(part, arrived)
                received[:, start : start + step] = arrived
        return received.view(memory.dtype).reshape(memory.shape)

    def sum_blocks(self, memory: np.ndarray) -> np.ndarray:
        """Exchange and add a little at a time, which stays in a core's cache; MPI's own reduce-scatter takes longer."""
        rows = memory.reshape(self.size, -1)
        total = empty((rows.shape[1],), memory.dtype)
        step = max(1, SUMMED // memory.dtype.itemsize // self.size)
        mine, theirs = (np.empty((self.size, step), memory.dtype) for _ in range(2))
        with self._together(f"a sum of blocks of {memory.nbytes} bytes"):
            for start in range(0, total.size, step):
                count = min(step, total.size - start)
                sent, arrived = (scratch.reshape(-1)[: self.size * count] for scratch in (mine, theirs))
                sent.reshape(self.size, count)[:] = rows[:, start : start + count]
                self.comm.Alltoall(sent.view(np.uint8), arrived.view(np.uint8))
                total[start : start + count] = combined(arrived.reshape(self.size, count), "sum")
        return total.reshape(memory.shape[1:])

    def pass_on(self, memory: np.ndarray, route: Route) -> np.ndarray:
        octets = memory.reshape(-1).view(np.uint8)
        received = np.zeros_like(octets)  # which it stays if no rank sends
        target, source = ends(route, self.rank)
        with self._together(f"a move of {memory.nbytes} bytes {route}"):
            for start in range(0, octets.size, CHUNK):
                part = slice(start, start + CHUNK)
                self.comm.Sendrecv(octets[part], target, ROUTE_TAG, received[part], source, ROUTE_TAG)
        return received.view(memory.dtype).reshape(memory.shape)

    def post(self, timeout: Callable[[], float]) -> MPIPost:
        return MPIPost(self.comm, self._name, self.world_ranks, timeout)

    def free(self) -> None:
        for comm in (self.comm, self._of_programs.comm):
            comm.Free()

    def gather_objects(self, value: Any) -> list[Any]:
        from jdistgrad.wire import mpi_process

        try:
            pieces = in_pieces(value)
        except Exception as error:  # the others wait for something in any case: an empty pickle, and the reason
            pieces = [b"", in_short(error).encode()]
        with self._together("a gather of objects"):
            found = mpi_process.allgather(self.comm, OBJECTS_TAG, pieces)
        for rank, (stream, *rest) in enumerate(found):
            if not stream:
                why = str(rest[0], "utf8")
                raise CollectiveError(f"a gather of objects: that of rank {rank} cannot be pickled: {why}")
        return [pickle.loads(stream, buffers=buffers) for stream, *buffers in found]


def _as_mpi(flat: np.ndarray, op: str) -> tuple[np.ndarray, Any, Any]:
    """Return memory, its MPI type and the operation: also for dtypes without such a type (bfloat16, 8-bit floats)."""
    from mpi4py import MPI as mpi  # noqa: N811

    dtype = flat.dtype
    small = dtype.kind in "iu" and dtype.itemsize <= 2  # Open MPI's sums of such numbers stop at the largest
    fits = not small if op == "sum" else dtype.kind != "f"  # MPI's maximum of NaN depends on the rank that holds it
    if dtype.num < EXTENSIONS_FROM and dtype.char in mpi._typedict:
        own = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[op]
        return flat, mpi._typedict[dtype.char], own if fits else _custom_op(dtype, op)
    carrier, kind = {1: (np.uint8, mpi.UINT8_T), 2: (np.uint16, mpi.UINT16_T)}[dtype.itemsize]
    return flat.view(carrier), kind, _custom_op(dtype, op)


@functools.cache
def _custom_op(dtype: np.dtype, op: str) -> Any:
    """Create an MPI operation on a NumPy dtype.

    Sending 16-bit floats as they are takes half the bytes of sending 32 bits, but rounds after each addition.
    """
    from mpi4py import MPI as mpi  # noqa: N811

    combine, wide = COMBINE[op], np.float32 if dtype.itemsize <= 2 and dtype.kind not in "iu" else dtype

    def run(theirs: Any, ours: Any, _: Any) -> None:
        a, b = np.frombuffer(theirs, dtype), np.frombuffer(ours, dtype)
        b[:] = combine(a.astype(wide), b.astype(wide))

    return mpi.Op.Create(run, commute=True)


def ends(route: Route, rank: int) -> tuple[int, int]:
    """Return the ranks that this rank sends to and gets from, in MPI's numbers."""
    from mpi4py import MPI as mpi  # noqa: N811

    target, source = route.target(rank), route.source(rank)
    return mpi.PROC_NULL if target is None else target, mpi.PROC_NULL if source is None else source


def has_mpi4jax() -> bool:
    return importlib.util.find_spec("mpi4jax") is not None


def in_pieces(value: Any) -> list[Any]:
    """Pickle an object; large arrays follow the pickle, uncopied: several times as fast."""
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes >= ALIAS_FROM:
            large.append(buffer.raw())
            return False
        return True

    stream = pickle.dumps(value, protocol=5, buffer_callback=stays)
    return [stream, *large]
