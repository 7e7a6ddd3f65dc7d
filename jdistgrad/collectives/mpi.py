"""Collectives over an MPI communicator: mpi4py on host memory; mpi4jax, where it is installed, inside jit."""

import contextlib
import copy
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdistgrad.collectives import communicators, mpi_in_programs, mpi_on_device
from jdistgrad.collectives.arithmetic import COMBINE, combined
from jdistgrad.collectives.base import Collectives, Op
from jdistgrad.collectives.host import TIMEOUT, HostCollectives, described
from jdistgrad.collectives.host_arrays import empty
from jdistgrad.collectives.mpi_in_programs import CHUNK, MET, ROUTE_TAG
from jdistgrad.collectives.primitive import Route
from jdistgrad.collectives.rank_devices import default_device
from jdistgrad.collectives.send_recv import Peer
from jdistgrad.collectives.spanning import Finish, Program, Span, at_home, in_one_order, where_it_was
from jdistgrad.collectives.world import FOR_ANY_WORLD, block_in_mpi
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.lowering import call_in_order, on_cpus
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import current_worker
from jdistgrad.threads import usable_cores
from jdistgrad.wire import launcher_env
from jdistgrad.wire.arrays import EXTENSIONS_FROM

SUMMED = 2 << 20  # bytes, see ``_sum_blocks``
HERE_TAG, OBJECTS_TAG = 31_073, 31_075
GRACE_SECONDS = 3.0
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

    device: jax.Device | None = None  # that arrays are reduced on; None: in host memory
    span: Span | None = None  # of the devices that programs span; None: programs are of one rank
    voting: bool = False  # whether an error of MPI is one that the ranks vote on
    _interrupt: Callable[[], None] | None = None  # ends an operation on all ranks that go on without those that died
    _met: Any = None  # in a section of a program that is not for CPUs: a flag that is there once the ranks have met

    def __init__(self, comm: Any = None, *, on_device: bool = False, timeout: float = TIMEOUT):
        whole = _checked(comm)
        from mpi4py import MPI as mpi  # noqa: N811

        self.rank, self.size, self.timeout = whole.rank, whole.size, timeout
        ranks = mpi.Group.Translate_ranks(whole.group, range(self.size), mpi.COMM_WORLD.group)
        self._begin_on(*communicators.duplicate(whole, Members(current_worker(), ranks), self.timeout))
        host = socket.gethostname()
        cores = [its for where, its in self.gather_objects((host, usable_cores())) if where == host]
        self.has_room = communicators.has_room(cores, self.size)
        self._by_mpi4jax = on_device or (type(self) is MPI and on_cpus() and mpi_on_device.has_mpi4jax())
        self._of_programs = self.duplicate()
        if on_device:
            self.device = default_device()
            self.agree("new collectives over MPI on devices")
            mpi_on_device.require_support(self.gather_objects(mpi_on_device.refusal()))

    def _begin_on(self, comm: Any, members: Members) -> None:
        """Use a communicator on which nothing is under way, and its members."""
        self.comm, self.members, self.turn, self.refusal = comm, members, 0, None
        self._beside = None
        self.inside: WatchedBlock | None = None  # of a section that a compiled program is in
        self._programs: dict[Any, Program] = {}

    def duplicate(self) -> "MPI":
        """Return the same ranks over another communicator. Every rank must call it."""
        other = copy.copy(self)
        other._begin_on(*communicators.duplicate(self.comm, self.members.again(), self.timeout))
        return other

    def __repr__(self) -> str:
        return f"MPI(rank={self.rank}, size={self.size}{'' if self.device is None else ', on_device=True'})"

    def twin(self) -> "MPI":
        other = self.duplicate()
        other._of_programs = other.duplicate()
        return other

    def together(self, what: str, *, may_leave: bool = False) -> WatchedBlock:
        """Return a block of an operation on this communicator, for the watchdog."""
        self.turn += 1
        entry = CollectiveEntry(what, ("in MPI", self.members.name), self.turn, may_leave)
        return block_in_mpi(self.keeper(), entry, self.world_ranks, self._interrupt)

    def reduce_in_place(self, memory: np.ndarray, op: Op = "sum") -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        flat, kind, operation = _as_mpi(memory.reshape(-1), op)
        step = max(1, CHUNK // flat.itemsize)
        with self.together(f"a {op} of {memory.nbytes} bytes"):
            for start in range(0, flat.size if self.size > 1 else 0, step):
                self.comm.Allreduce(mpi.IN_PLACE, [flat[start : start + step], kind], operation)

    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        octets = memory.reshape(-1).view(np.uint8)
        with self.together(f"a broadcast of {memory.nbytes} bytes"):
            for start in range(0, octets.size, CHUNK):
                self.comm.Bcast(octets[start : start + CHUNK], root)

    def moved(self, name: str, memory: np.ndarray, how: Any) -> np.ndarray:
        if isinstance(how, Route):
            return self._pass_on(memory, how)
        return self._sum_blocks(memory) if name == "scatter" else self._gather(name, memory)

    def _gather(self, name: str, memory: np.ndarray) -> np.ndarray:
        """Return the arrays, or in an ``alltoall`` the blocks for this rank, of all ranks, by rank."""
        exchange = self.comm.Alltoall if name == "alltoall" else self.comm.Allgather
        octets = memory.reshape(self.size if name == "alltoall" else 1, -1).view(np.uint8)
        everybody = empty((self.size, octets.shape[1]), np.uint8)
        step = max(1, CHUNK // self.size)
        with self.together(f"an {name} of {memory.nbytes} bytes"):
            for start in range(0, octets.shape[1], step):
                part = np.ascontiguousarray(octets[:, start : start + step])
                received = np.empty((self.size, part.shape[1]), np.uint8)
                exchange(part, received)
                everybody[:, start : start + step] = received
        shape = memory.shape if name == "alltoall" else (self.size, *memory.shape)
        return everybody.reshape(-1).view(memory.dtype).reshape(shape)

    def _sum_blocks(self, memory: np.ndarray) -> np.ndarray:
        """Exchange and add a little at a time, which stays in a core's cache; MPI's own reduce-scatter takes longer."""
        rows = memory.reshape(self.size, -1)
        total = empty((rows.shape[1],), memory.dtype)
        step = max(1, SUMMED // memory.dtype.itemsize // self.size)
        mine, theirs = (np.empty((self.size, step), memory.dtype) for _ in range(2))
        with self.together(f"a sum of blocks of {memory.nbytes} bytes"):
            for start in range(0, total.size, step):
                count = min(step, total.size - start)
                sent, arrived = (scratch.reshape(-1)[: self.size * count] for scratch in (mine, theirs))
                sent.reshape(self.size, count)[:] = rows[:, start : start + count]
                self.comm.Alltoall(sent.view(np.uint8), arrived.view(np.uint8))
                total[start : start + count] = combined(arrived.reshape(self.size, count), "sum")
        return total.reshape(len(memory) // self.size, *memory.shape[1:])

    def _pass_on(self, memory: np.ndarray, route: Route) -> np.ndarray:
        octets = memory.reshape(-1).view(np.uint8)
        received = np.zeros_like(octets)  # which it stays if no rank sends
        target, source = mpi_in_programs.ends(route, self.rank)
        with self.together(f"a move of {memory.nbytes} bytes {route}"):
            for start in range(0, octets.size, CHUNK):
                part = slice(start, start + CHUNK)
                self.comm.Sendrecv(octets[part], target, ROUTE_TAG, received[part], source, ROUTE_TAG)
        return received.view(memory.dtype).reshape(memory.shape)

    def free(self) -> None:
        for comm in (self.comm, self._of_programs.comm):
            comm.Free()

    # Inside jit, by mpi4jax where it is installed.

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if self._met is None:
            return super().perform(name, x, how)
        performer = copy.copy(self)
        performer._met = None  # a value of the trace that the section is in; the operation may be traced in another
        return performer.perform(name, self._after_meeting(x), how)

    def _after_meeting(self, x: jax.Array) -> jax.Array:
        return x if self._met is None else jnp.where(self._met, x, jnp.zeros_like(x))

    def compiled(self, name: str, x: jax.Array, how: Any) -> jax.Array:
        if not self._by_mpi4jax:
            return super().compiled(name, x, how)
        return mpi_in_programs.performed(self._of_programs, name, self._after_meeting(x), how)

    def effect(self) -> Any:
        return mpi_in_programs.in_order() if self._by_mpi4jax else super().effect()

    def section(self, what: str) -> Any:
        if not self._by_mpi4jax or not self.meets_in_programs or self.size == 1:
            return super().section(what)
        return self._section_by_mpi4jax(what)

    @contextlib.contextmanager
    def _section_by_mpi4jax(self, what: str) -> Iterator["MPI"]:
        quiet, channel, timeout = copy.copy(self), self._of_programs, self.timeout
        quiet.meets_in_programs = False
        if not on_cpus():  # operations of the section use the flag, so they wait for the agreement
            quiet._met = io_callback(lambda: mpi_in_programs.meet(channel, what, timeout), MET, ordered=True)
            yield quiet
            return
        enter = functools.partial(mpi_in_programs.enter, channel, what, timeout)
        call_in_order(enter, (), effect=self.effect(), quick=True)
        yield quiet
        call_in_order(functools.partial(mpi_in_programs.leave, channel), (), effect=self.effect(), quick=True)

    # On the ranks' devices.

    def eager(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if self.device is None or isinstance(how, Peer):
            return super().eager(name, x, how)
        x, before = at_home(x, self.device), x
        what, key = described(name, x, how), (name, how, jax.typeof(x))
        if key not in self._programs:

            def finish(all_: Collectives, results: list[Any]) -> list[Any]:
                return [all_.perform(name, results[0], how)]

            self._programs[key] = self.program(jax.make_jaxpr(lambda x: x)(x), [x], finish, what)
        shared = self._programs[key].prepare([x])
        with in_one_order:
            self.agree(what)
            return where_it_was(self.dispatch(self._programs[key], shared, what, [x])[0], before)

    def program(self, closed: Any, like: Sequence[Any], finish: Finish, what: str) -> Program:
        """Return a program of a jaxpr, and of what ``finish`` makes of its results with collectives."""
        return mpi_on_device.rank_program(self, closed, finish, what)

    def dispatch(
        self, program: Program, shared: Sequence[jax.Array], what: str, inputs: Sequence[Any], key: Any = None
    ) -> list[jax.Array]:
        """Run a program that all ranks have agreed on; return its results for this rank.

        Arguments:
          shared: the arguments of the program, made of ``inputs``.
          key: the same on all ranks, and for equal programs only; default ``what``.
        """
        return program.launch(shared)[0]


def _checked(comm: Any) -> Any:
    """Return the communicator that collectives are made of. Raises CollectiveError if there is none for them."""
    launcher_env.refuse_place_of_another_process("collectives.MPI")
    try:
        from mpi4py import MPI as mpi  # noqa: N811
    except ImportError as error:
        raise CollectiveError(
            f"MPI: {error}. Collectives over MPI need mpi4py (pip install 'jdistgrad[mpi]') and an MPI; workers as "
            "threads need neither (jdistgrad.collectives.Local)."
        ) from error
    from jdistgrad.wire.mpi_process import require_the_others

    worker = current_worker()
    if comm is None:
        if mpi.COMM_WORLD.size == 1 and worker.shares_process:
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
    return whole


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
