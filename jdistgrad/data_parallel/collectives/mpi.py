"""The ranks of an MPI communicator: mpi4py on host memory, mpi4jax inside jit."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel.collectives.base import Op
from jdistgrad.data_parallel.collectives.board import missing_ranks
from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.errors import CollectiveError
from jdistgrad.wire.pacing import nap
from jdistgrad.wire.progress import pause

CHUNK = 1 << 29  # bytes: MPI counts are C ints, and a gather multiplies by the ranks
HERE_TAG = 31_073
GRACE_SECONDS = 1.0

_begun: dict[int, Any] = {}  # meetings that have not ended: MPI uses their memory, whoever has given them up


class MPI(HostCollectives):
    """The ranks are those of a communicator, of which a duplicate is made. Every rank of it must make one.

    Arguments:
      comm: an mpi4py communicator; default ``MPI.COMM_WORLD``.
    """

    def __init__(self, comm: Any = None):
        from mpi4py import MPI as mpi  # noqa: N811

        whole = mpi.COMM_WORLD if comm is None else _checked(comm)
        twin, request = whole.Idup()
        if not poll(request.Test, self.timeout):
            raise CollectiveError(f"MPI: the communicator could not be duplicated within {self.timeout:g} s")
        self.comm, self.rank, self.size = twin, twin.rank, twin.size
        self.has_room = has_room(_neighbours_cores(twin), twin.size)

    @staticmethod
    def subset(ranks: Sequence[int]) -> Any:
        """A communicator of some ranks of ``MPI.COMM_WORLD``. All of them must call it."""
        from mpi4py import MPI as mpi  # noqa: N811

        return mpi.COMM_WORLD.Create_group(mpi.COMM_WORLD.group.Incl(ranks))

    def __repr__(self) -> str:
        return f"MPI(rank={self.rank}, size={self.size})"

    def twin(self) -> "MPI":
        other = MPI(self.comm)
        other.timeout = self.timeout
        return other

    def announce(self, word: bytes, what: str) -> Callable[[float], list[bytes]]:
        everybody = bytearray(len(word) * self.size)
        request = self.comm.Iallgather(word, everybody)
        _begun[id(request)] = (word, everybody, request)

        def wait(timeout: float) -> list[bytes]:
            if not poll(request.Test, timeout):
                raise missing_ranks(what, self._missing(), timeout)
            _begun.pop(id(request))
            return [bytes(everybody[k : k + len(word)]) for k in range(0, len(everybody), len(word))]

        return wait

    def _missing(self) -> list[int]:
        """Who else waits, by asking everybody to say so: those who do not are missing."""
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
        from jdistgrad.data_parallel.collectives import arithmetic

        arithmetic.allreduce(self.comm, memory, op, CHUNK)

    def broadcast_in_place(self, memory: np.ndarray, root: int) -> None:
        octets = memory.reshape(-1).view(np.uint8)
        for start in range(0, octets.size, CHUNK):
            self.comm.Bcast(octets[start : start + CHUNK], root)

    def gather_arrays(self, memory: np.ndarray) -> np.ndarray:
        octets = np.ascontiguousarray(memory).reshape(-1).view(np.uint8)
        everybody = np.empty((self.size, octets.size), np.uint8)
        step = max(1, CHUNK // self.size)
        for start in range(0, octets.size, step):
            part = octets[start : start + step]
            received = np.empty((self.size, part.size), np.uint8)
            self.comm.Allgather(part, received)
            everybody[:, start : start + step] = received
        return everybody.reshape(-1).view(memory.dtype).reshape(self.size, *memory.shape)

    def gather_objects(self, value: Any) -> list[Any]:
        """With arrays beside the pickle, not in it: of any size, and several times as fast."""
        from mpi4py.util import pkl5

        return list(pkl5.Intracomm(self.comm).allgather(value))

    def traced(self, name: str, x: jax.Array, root: int = 0) -> jax.Array:
        """With what MPI has no type for carried in another dtype, and what it cannot count in pieces."""
        shape = (self.size, *x.shape) if name == "allgather" else x.shape
        if x.size == 0:
            return jnp.zeros(shape, x.dtype)
        if self.size == 1:
            return x.reshape(shape)
        flat = x.reshape(-1).astype(_carrier(x.dtype))
        step = max(1, CHUNK // (flat.dtype.itemsize * (self.size if name == "allgather" else 1)))
        pieces = jnp.split(flat, list(range(step, flat.size, step)))
        found = [self._run(name, piece, root) for piece in pieces]
        whole = found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)
        return whole.reshape(shape).astype(x.dtype)

    def _run(self, name: str, x: jax.Array, root: int) -> jax.Array:
        import mpi4jax
        from mpi4py import MPI as mpi  # noqa: N811

        if name == "allgather":
            return mpi4jax.allgather(x, comm=self.comm)
        if name == "broadcast":
            return mpi4jax.bcast(x, root, comm=self.comm)
        reduced = mpi4jax.allreduce(x, op={"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[name], comm=self.comm)
        if name == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
            return reduced
        unknown = mpi4jax.allreduce(jnp.isnan(x).astype(jnp.int32), op=mpi.SUM, comm=self.comm)
        return jnp.where(unknown > 0, jnp.nan, reduced)  # MPI's maximum of NaN depends on the rank it comes from


def _neighbours_cores(comm: Any) -> list[set[int]]:
    """The cores that each rank on this machine may use."""
    from mpi4py import MPI as mpi  # noqa: N811

    neighbours = comm.Split_type(mpi.COMM_TYPE_SHARED)
    cores: list[set[int]] = neighbours.allgather(os.sched_getaffinity(0))
    neighbours.Free()
    return cores


def has_room(neighbours: Sequence[set[int]], size: int) -> bool:
    """On one machine reductions are work for a core: there must be one that does not compute. Elsewhere they wait.

    Arguments:
      neighbours: the cores of each rank on this machine.
      size: how many ranks there are on all.
    """
    return len(neighbours) < size or len(set().union(*neighbours)) >= 2 * len(neighbours)


def poll(done: Callable[[], Any], timeout: float) -> bool:
    """Wait without spinning: whoever computes beside needs the core. False when it took too long."""
    start = time.monotonic()
    while not done():
        quiet = time.monotonic() - start
        if quiet > timeout:
            return False
        pause(nap(quiet, may_spin=False))
    return True


def _carrier(dtype: Any) -> Any:
    """The dtype that carries another through mpi4jax, exactly."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.float32
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool else dtype


def _checked(comm: Any) -> Any:
    from mpi4py import MPI as mpi  # noqa: N811

    if not isinstance(comm, mpi.Comm) or comm == mpi.COMM_NULL or comm.Is_inter():
        raise CollectiveError(
            f"MPI: comm must be an intracommunicator this rank belongs to, not {comm!r}. Ranks outside a group "
            "(MPI.COMM_NULL) take no part in its collectives."
        )
    return comm
