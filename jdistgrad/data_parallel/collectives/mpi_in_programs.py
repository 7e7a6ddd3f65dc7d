"""Collectives over MPI whose compiled programs reduce through mpi4jax, without calling Python for each operation."""

import copy
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdistgrad.data_parallel.collectives.host import TIMEOUT
from jdistgrad.data_parallel.collectives.mpi import AT_ONCE, CHUNK, MPI, ROUTE_TAG, ends
from jdistgrad.data_parallel.collectives.primitive import Route
from jdistgrad.data_parallel.collectives.roll_call import Agreeing
from jdistgrad.data_parallel.collectives.world import WatchedBlock
from jdistgrad.ffi.abi import carrier
from jdistgrad.ffi.lowering import call_in_order, on_cpus
from jdistgrad.ffi.sites import Deferred

MET = jax.ShapeDtypeStruct((), np.bool_)  # the result of a callback in which the ranks agree


class WithMpi4jax(MPI):
    """``MPI()`` where mpi4jax is installed: compiled programs reduce through it."""

    def __init__(self, comm: Any = None, *, on_device: bool = False, timeout: float = TIMEOUT):
        super().__init__(comm, timeout=timeout)
        self._sections, self._met = Sections(self._of_programs), None

    def twin(self) -> "MPI":
        other = cast("WithMpi4jax", super().twin())
        other._sections = Sections(other._of_programs)
        return other

    def _opened(self, what: str) -> "WithMpi4jax":
        quiet = copy.copy(self)
        if on_cpus():
            call_in_order(lambda: self._sections.enter(what, self.timeout), (), effect=self.effect(), quick=True)
        else:  # operations of the section use the flag, so they wait for the agreement
            quiet._met = io_callback(lambda: self._sections.agree(what, self.timeout), MET, ordered=True)
        return quiet

    def _end(self) -> None:
        if on_cpus():
            call_in_order(self._sections.leave, (), effect=self.effect(), quick=True)

    def effect(self) -> Any:
        return _in_order()

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        if self._met is None:
            return super().perform(name, x, how)
        performer = copy.copy(self)
        performer._met = None  # a value of the trace that the section is in; the operation may be traced in another
        return performer.perform(name, self._after_meeting(x), how)

    def _after_meeting(self, x: jax.Array) -> jax.Array:
        return x if self._met is None else jnp.where(self._met, x, jnp.zeros_like(x))

    def compiled(self, name: str, x: jax.Array, how: Any) -> jax.Array:
        """Apply an operation; cast dtypes without an MPI type, and split arrays too large for MPI's counts."""
        if name == "scatter":
            blocks = x.reshape(self.size, len(x) // self.size, *x.shape[1:])
            return self.compiled("alltoall", blocks, how).sum(axis=0, dtype=x.dtype)
        shape = (self.size, *x.shape) if name == "allgather" else x.shape
        if x.size == 0:
            return jnp.zeros(shape, x.dtype)
        if self.size == 1 and not isinstance(how, Route):
            return x.reshape(shape)
        x = self._after_meeting(x)
        flat = x.reshape(self.size if name == "alltoall" else 1, -1).astype(_carrier(x.dtype, name))
        step = max(1, CHUNK // (flat.dtype.itemsize * (self.size if name in ("allgather", "alltoall") else 1)))
        pieces = jnp.split(flat, list(range(step, flat.shape[1], step)), axis=1)
        found = [self._run(name, piece, how) for piece in pieces]
        whole = found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)
        return whole.reshape(shape).astype(x.dtype)

    def _run(self, name: str, x: jax.Array, how: Any) -> jax.Array:
        import mpi4jax
        from mpi4py import MPI as mpi  # noqa: N811

        comm = self._of_programs.comm
        if name == "allgather":
            return mpi4jax.allgather(x, comm=comm)
        if name == "broadcast":
            return mpi4jax.bcast(x, how, comm=comm)
        if name == "alltoall":
            return mpi4jax.alltoall(x, comm=comm)
        if isinstance(how, Route):
            target, source = ends(how, self.rank)
            moved = mpi4jax.sendrecv(x, x, source, target, sendtag=ROUTE_TAG, recvtag=ROUTE_TAG, comm=comm)
            return jnp.zeros_like(moved) if source == mpi.PROC_NULL else moved
        reduced = mpi4jax.allreduce(x, op={"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[name], comm=comm)
        if name == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
            return reduced
        unknown = mpi4jax.allreduce(jnp.isnan(x).astype(jnp.int32), op=mpi.SUM, comm=comm)
        return jnp.where(unknown > 0, jnp.nan, reduced)  # MPI's maximum of NaN depends on the rank that holds it


class Sections:
    """The sections of the programs that reduce through mpi4jax.

    A section begins with a meeting of the ranks, and counts as being inside MPI until it ends. The effect of mpi4jax's
    operations keeps meetings and operations in the program's order.
    """

    def __init__(self, collectives: MPI):
        self.collectives = collectives
        self._inside: WatchedBlock | None = None

    def agree(self, what: str, timeout: float) -> np.ndarray:
        Agreeing(self.collectives, self._described(what))(timeout)
        return np.ones(MET.shape, MET.dtype)

    def enter(self, what: str, timeout: float) -> Deferred | None:
        """Begin a section. Ranks that are in step meet at once, which costs less than a wait on another thread."""
        self.leave()  # a program that failed did not end its section
        agreeing = Agreeing(self.collectives, self._described(what))
        if not agreeing.meeting.completes_within(AT_ONCE):
            return Deferred(functools.partial(self._entered, what, agreeing, timeout))
        self._entered(what, agreeing, timeout)
        return None

    def _entered(self, what: str, agreeing: Agreeing, timeout: float) -> None:
        agreeing(timeout)
        self._inside = self.collectives._together(self._described(what))
        self._inside.__enter__()

    def _described(self, what: str) -> str:
        return f"compiled {what}, by mpi4jax"  # a rank with a GPU reduces in another way, and must not meet this one

    def leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__()


MPI.kind_in_programs = WithMpi4jax


@functools.cache
def _in_order() -> Any:
    """Return the effect of mpi4jax's operations, which keeps the program's order."""
    import mpi4jax
    from mpi4py import MPI as mpi  # noqa: N811

    (effect,) = jax.make_jaxpr(lambda x: mpi4jax.allreduce(x, op=mpi.SUM, comm=mpi.COMM_SELF))(0.0).effects
    return effect


def _carrier(dtype: Any, name: str) -> Any:
    """Return the dtype that carries another exactly through an operation of mpi4jax."""
    if name == "sum" and jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.int32  # MPI's sums of small integers stop at the largest instead of wrapping around
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.float32
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool else carrier(dtype)
