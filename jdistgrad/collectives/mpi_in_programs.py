"""Collectives over MPI whose compiled programs reduce through mpi4jax, without calling Python for each operation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.engines import CHUNK, ROUTE_TAG, mpi_ends
from jdistgrad.collectives.operations import OPERATIONS, Route
from jdistgrad.collectives.roll_call import agree, word_of
from jdistgrad.ffi.abi import carrier
from jdistgrad.ffi.sites import Deferred

AT_ONCE = 100e-6  # seconds
RUN = "allreduce", "broadcast", "allgather", "alltoall", "shift", "permute"  # the operations of mpi4jax
MET = jax.ShapeDtypeStruct((), np.bool_)  # the result of a callback in which the ranks agree


def performed(all_: Any, name: str, x: jax.Array, how: Any) -> jax.Array:
    """Apply an operation; cast dtypes without an MPI type, and split arrays too large for MPI's counts."""
    if name == "reduce_scatter":
        blocks = x.reshape(all_.size, len(x) // all_.size, *x.shape[1:])
        return performed(all_, "alltoall", blocks, how).sum(axis=0, dtype=x.dtype)
    if name not in RUN:
        rows = performed(all_, "allgather", x, None)
        return OPERATIONS[name].result(rows, all_.rank, how).astype(x.dtype)
    shape = OPERATIONS[name].shape(x.shape, all_.size)
    if x.size == 0:
        return jnp.zeros(shape, x.dtype)
    if all_.size == 1 and not isinstance(how, Route):
        return x.reshape(shape)
    flat = x.reshape(all_.size if name == "alltoall" else 1, -1).astype(_carrier(x.dtype, how))
    step = max(1, CHUNK // (flat.dtype.itemsize * (all_.size if name in ("allgather", "alltoall") else 1)))
    pieces = jnp.split(flat, list(range(step, flat.shape[1], step)), axis=1)
    found = [_run(all_, name, piece, how) for piece in pieces]
    whole = found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)
    return whole.reshape(shape).astype(x.dtype)


def _run(all_: Any, name: str, x: jax.Array, how: Any) -> jax.Array:
    import mpi4jax
    from mpi4py import MPI as mpi  # noqa: N811

    comm = all_.engine.comm

    if name == "allgather":
        return mpi4jax.allgather(x, comm=comm)
    if name == "broadcast":
        return mpi4jax.bcast(x, how, comm=comm)
    if name == "alltoall":
        return mpi4jax.alltoall(x, comm=comm)
    if isinstance(how, Route):
        target, source = mpi_ends(how, all_.rank)
        moved = mpi4jax.sendrecv(x, x, source, target, sendtag=ROUTE_TAG, recvtag=ROUTE_TAG, comm=comm)
        return jnp.zeros_like(moved) if source == mpi.PROC_NULL else moved
    reduced = mpi4jax.allreduce(x, op={"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}[how], comm=comm)
    if how == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return reduced
    unknown = mpi4jax.allreduce(jnp.isnan(x).astype(jnp.int32), op=mpi.SUM, comm=comm)
    return jnp.where(unknown > 0, jnp.nan, reduced)  # MPI's maximum of NaN depends on the rank that holds it


# A section of a program begins with a meeting of the ranks, and counts as being inside MPI until it ends. The effect of
# mpi4jax's operations keeps meetings and operations in the program's order.

BY_MPI4JAX = "compiled {}, by mpi4jax"  # a rank with a GPU reduces in another way, and must not meet this one


def meet(all_: Any, what: str, timeout: float) -> np.ndarray:
    """Begin a section of a program that is not for CPUs; return the flag that its operations wait for."""
    agree(all_, BY_MPI4JAX.format(what), timeout)
    return np.ones(MET.shape, MET.dtype)


def enter(all_: Any, what: str, timeout: float) -> Deferred | None:
    """Begin a section. Ranks that are in step meet at once, which costs less than a wait on another thread."""
    leave(all_)  # a program that failed did not end its section
    text = BY_MPI4JAX.format(what)
    meeting = all_.members.begin(word_of(all_, text), text)

    def entered() -> None:
        agree(all_, text, timeout, meeting)
        all_.inside = all_.engine.block(text)
        all_.inside.__enter__()

    if not meeting.at_once(AT_ONCE):
        return Deferred(entered)
    entered()
    return None


def leave(all_: Any) -> None:
    inside, all_.inside = all_.inside, None
    if inside is not None:
        inside.__exit__()


@functools.cache
def in_order() -> Any:
    """Return the effect of mpi4jax's operations, which keeps the program's order."""
    import mpi4jax
    from mpi4py import MPI as mpi  # noqa: N811

    (effect,) = jax.make_jaxpr(lambda x: mpi4jax.allreduce(x, op=mpi.SUM, comm=mpi.COMM_SELF))(0.0).effects
    return effect


def _carrier(dtype: Any, how: Any) -> Any:
    """Return the dtype that carries another exactly through an operation of mpi4jax."""
    if how == "sum" and jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.int32  # MPI's sums of small integers stop at the largest instead of wrapping around
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.float32
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool else carrier(dtype)
