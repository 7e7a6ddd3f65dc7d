"""Engines that run operations on arrays in host memory: by threads of one process, and by MPI.

An engine is for one thread at a time, on all ranks in the same order. These are its methods:

* ``run`` returns what this rank gets, of contiguous memory, which some operations overwrite and return.
* ``again`` returns an engine of the same ranks over another channel; ``free`` frees the channel. Every rank must call
  them.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jdistgrad.collectives import world
from jdistgrad.collectives.host_arrays import empty
from jdistgrad.collectives.operations import CHUNK, COMBINE, OPERATIONS, Route, combined, described
from jdistgrad.collectives.roll_call import require_same_texts
from jdistgrad.collectives.world import raise_lost
from jdistgrad.leaves import EXTENSIONS_FROM
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock

SUMMED = 2 << 20  # bytes, see ``OverMPI._reduce_scatter``
MOVES = 1000  # the tag of letters along routes: users' tags are smaller


class Threads:
    """Runs operations of threads, which read each other's arrays."""

    def __init__(self, members: Members):
        self.members = members

    def again(self, timeout: float) -> "Threads":
        return Threads(self.members.again())

    def free(self) -> None:
        self.members.close()

    def _exchange(self, what: str, value: Any, timeout: float) -> list[Any]:
        found = self.members.begin((what, value), what).wait(timeout)
        require_same_texts([text for text, _ in found])
        return [value for _, value in found]

    def run(self, name: str, memory: np.ndarray, how: Any, timeout: float) -> np.ndarray:
        what, row, rank = described(name, memory, how), OPERATIONS[name], self.members.rank
        if name == "allreduce":  # each rank reduces a part, and all write to rank 0's array
            flat = memory.reshape(-1)
            shared = self._exchange(what, (flat, np.empty_like(flat) if rank == 0 else None), timeout)
            found, count = shared[0][1], self.members.size
            mine = slice(flat.size * rank // count, flat.size * (rank + 1) // count)
            found[mine] = row.result([theirs[mine] for theirs, _ in shared], rank, how)
        else:
            found = row.result(self._exchange(what, memory, timeout), rank, how).astype(memory.dtype, copy=False)
        self._exchange(f"the end of {name}", None, timeout)
        if not row.overwrites:
            return found
        memory[...] = found.reshape(memory.shape)
        return memory


class OverMPI:
    """Runs operations over an MPI communicator that nothing else uses.

    ``interrupt``: ends an operation on all ranks, if they go on without dead ranks.
    """

    def __init__(self, comm: Any, members: Members, interrupt: Callable[[], None] | None = None):
        self.comm, self.members, self.interrupt, self._turn = comm, members, interrupt, 0

    def again(self, timeout: float) -> "OverMPI":
        members = self.members.again()
        comm = world.duplicate(self.comm, members, timeout)
        return OverMPI(comm, members, None if self.interrupt is None else comm.Revoke)

    def free(self) -> None:
        self.comm.Free()
        self.members.close()

    def block(self, what: str, *, may_leave: bool = False) -> WatchedBlock:
        """Return a watched block for an operation on this communicator. Its errors name the lost rank."""
        self._turn += 1
        entry = CollectiveEntry(what, ("in MPI", self.members.name), self._turn, may_leave)
        explain = functools.partial(raise_lost, ranks=self.members.ranks, what=what, patient=self.interrupt is None)
        return WatchedBlock(
            self.members.worker, entry, self.members.ranks, blocking=True, interrupt=self.interrupt, explain=explain
        )

    def run(self, name: str, memory: np.ndarray, how: Any, timeout: float) -> np.ndarray:
        what = described(name, memory, how)
        if isinstance(how, Route):
            return self._move(memory, how, what, timeout)
        with self.block(what):
            if name == "allreduce":
                return self._allreduce(memory, how)
            if name == "broadcast":
                octets = memory.reshape(-1).view(np.uint8)
                for start in range(0, octets.size, CHUNK):
                    self.comm.Bcast(octets[start : start + CHUNK], how)
                return memory
            if name == "reduce_scatter":
                return self._reduce_scatter(memory)
            found = self._gather("alltoall" if name == "alltoall" else "allgather", memory)
            if name in ("alltoall", "allgather"):
                return found
            return OPERATIONS[name].result(found, self.members.rank, how).astype(memory.dtype, copy=False)

    def _allreduce(self, memory: np.ndarray, op: str) -> np.ndarray:
        from mpi4py import MPI as mpi  # noqa: N811

        flat, kind, operation = _as_mpi(memory.reshape(-1), op)
        step = max(1, CHUNK // flat.itemsize)
        for start in range(0, flat.size if self.members.size > 1 else 0, step):
            self.comm.Allreduce(mpi.IN_PLACE, [flat[start : start + step], kind], operation)
        return memory

    def _gather(self, name: str, memory: np.ndarray) -> np.ndarray:
        """Return the arrays, or in an ``alltoall`` the blocks for this rank, of all ranks, by rank."""
        exchange, size = (self.comm.Alltoall if name == "alltoall" else self.comm.Allgather), self.members.size
        octets = memory.reshape(size if name == "alltoall" else 1, -1).view(np.uint8)
        everybody = empty((size, octets.shape[1]), np.uint8)
        step = max(1, CHUNK // size)
        for start in range(0, octets.shape[1], step):
            part = np.ascontiguousarray(octets[:, start : start + step])
            received = np.empty((size, part.shape[1]), np.uint8)
            exchange(part, received)
            everybody[:, start : start + step] = received
        return everybody.reshape(-1).view(memory.dtype).reshape(OPERATIONS[name].shape(memory.shape, size))

    def _reduce_scatter(self, memory: np.ndarray) -> np.ndarray:
        """Exchange and add pieces that fit a core's cache: faster than Open MPI 5's reduce-scatter."""
        size = self.members.size
        rows = memory.reshape(size, -1)
        total = empty((rows.shape[1],), memory.dtype)
        step = max(1, SUMMED // memory.dtype.itemsize // size)
        mine, theirs = (np.empty((size, step), memory.dtype) for _ in range(2))
        for start in range(0, total.size, step):
            count = min(step, total.size - start)
            sent, arrived = (scratch.reshape(-1)[: size * count] for scratch in (mine, theirs))
            sent.reshape(size, count)[:] = rows[:, start : start + count]
            self.comm.Alltoall(sent.view(np.uint8), arrived.view(np.uint8))
            total[start : start + count] = combined(arrived.reshape(size, count), "sum")
        return total.reshape(len(memory) // size, *memory.shape[1:])

    def _move(self, memory: np.ndarray, route: Route, what: str, timeout: float) -> np.ndarray:
        (target, source), here = route.ends(self.members.rank), self.members.rank
        if target is not None and target != here:
            self.members.send(target, MOVES, memory.reshape(-1).view(np.uint8))
        if source is None or source == here:
            return np.zeros_like(memory) if source is None else memory.copy()
        octets: np.ndarray = self.members.receive(source, MOVES, what, timeout)
        return octets.view(memory.dtype).reshape(memory.shape)


def _as_mpi(flat: np.ndarray, op: str) -> tuple[np.ndarray, Any, Any]:
    """Return memory, an MPI type and an operation, also for dtypes that MPI lacks (bfloat16, 8-bit floats)."""
    from mpi4py import MPI as mpi  # noqa: N811

    dtype = flat.dtype
    small = dtype.kind in "iu" and dtype.itemsize <= 2  # Open MPI 5's sums of small integers saturate
    fits = not small if op == "sum" else dtype.kind != "f"  # MPI's maximum of NaN depends on the rank that holds it
    if dtype.num < EXTENSIONS_FROM and dtype.char in mpi._typedict:
        own = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[op]
        return flat, mpi._typedict[dtype.char], own if fits else _custom_op(dtype, op)
    carrier, kind = {1: (np.uint8, mpi.UINT8_T), 2: (np.uint16, mpi.UINT16_T)}[dtype.itemsize]
    return flat.view(carrier), kind, _custom_op(dtype, op)


@functools.cache
def _custom_op(dtype: np.dtype, op: str) -> Any:
    """Create an MPI operation on a NumPy dtype. 16-bit floats are sent in half the bytes, but round after each sum."""
    from mpi4py import MPI as mpi  # noqa: N811

    combine, wide = COMBINE[op], np.float32 if dtype.itemsize <= 2 and dtype.kind not in "iu" else dtype

    def run(theirs: Any, ours: Any, _: Any) -> None:
        a, b = np.frombuffer(theirs, dtype), np.frombuffer(ours, dtype)
        b[:] = combine(a.astype(wide), b.astype(wide))

    return mpi.Op.Create(run, commute=True)
