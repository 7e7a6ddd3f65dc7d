"""mpi4jax: collectives over MPI inside compiled programs, without calling Python for each operation.

On accelerators mpi4jax passes device pointers to MPI, which is tried beforehand.
"""

import functools
import importlib.util
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import jaxprs
from jdistgrad.collectives.operations import CHUNK, OPERATIONS, Route, keeping_nans
from jdistgrad.collectives.roll_call import agree, announce
from jdistgrad.collectives.spanning import Finish, Program
from jdistgrad.ffi.abi import carrier
from jdistgrad.ffi.sites import Deferred
from jdistgrad.leaves import as_jax_array
from jdistgrad.rpc.devices import opened_gpus
from jdistgrad.wire import launcher_env

ROUTE_TAG = 31_074
AT_ONCE = 100e-6  # seconds
RUN = "allreduce", "broadcast", "allgather", "alltoall", "shift", "permute"  # the operations that mpi4jax has
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
    return jnp.concatenate(found, axis=-1).reshape(shape).astype(x.dtype)


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
        target, source = (mpi.PROC_NULL if end is None else end for end in how.ends(all_.rank))
        moved = mpi4jax.sendrecv(x, x, source, target, sendtag=ROUTE_TAG, recvtag=ROUTE_TAG, comm=comm)
        return jnp.zeros_like(moved) if source == mpi.PROC_NULL else moved
    operations = {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN}
    return keeping_nans(lambda x, op: mpi4jax.allreduce(x, op=operations[op], comm=comm), x, how)


# A section of a program begins with a meeting of the ranks, and counts as being inside MPI until it ends. The effect of
# mpi4jax's operations keeps meetings and operations in the program's order.

BY_MPI4JAX = "compiled {}, by mpi4jax"  # a rank that reduces otherwise (with a GPU) must not meet this one


def meet(all_: Any, what: str, timeout: float) -> np.ndarray:
    """Begin a section of a program that is not for CPUs; return the flag that its operations depend on."""
    agree(all_, BY_MPI4JAX.format(what), timeout)
    return np.ones(MET.shape, MET.dtype)


def enter(all_: Any, what: str, timeout: float) -> Deferred | None:
    """Begin a section. Synchronous ranks meet at once, which costs less than a wait on another thread."""
    leave(all_)  # the section of a failed program
    text = BY_MPI4JAX.format(what)
    meeting = announce(all_, text)

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
        return jnp.int32  # Open MPI 5's sums of small integers saturate
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2:
        return jnp.float32
    return jnp.int8 if jnp.dtype(dtype) == jnp.bool else carrier(dtype)


# Arrays reduced in device memory.

TRIAL_SECONDS = 60.0
WHAT = "a send of a device array, tried in a separate process,"
USES_CUDA_MPI = "MPI4JAX_USE_CUDA_MPI"

# A send of device memory to the same process. An MPI that does not take device pointers crashes.
TRIAL = """
import jax, jax.numpy as jnp, mpi4jax
from mpi4py import MPI
x = jnp.arange(1 << 20, dtype=jnp.float32)
y = jax.jit(lambda x: mpi4jax.sendrecv(x, x, 0, 0, comm=MPI.COMM_SELF))(x)
if not (x == y).all():
    raise ValueError("received other numbers than were sent")
"""


def rank_program(all_: Any, closed: Any, finish: Finish, what: str) -> Program:
    """Return a program of this rank alone, ``closed``, that ends with reductions over all ranks, ``finish``."""
    # Constants are arguments, not part of the compiled code; copied, since the user's program may change them.
    constants, first = [as_jax_array(const) for const in closed.consts], len(closed.jaxpr.invars)

    def run(constants: list[Any], leaves: list[Any]) -> tuple[list[Any], jax.Array]:
        results = jaxprs.evaluate(closed.jaxpr, constants, leaves[:first])
        with all_.section(what) as inside:
            return finish(inside, results, *leaves[first:]), jnp.zeros((), jnp.int8)

    # The ranks' programs may differ, so each compiles at once.
    return Program(jax.jit(run), lambda leaves: [constants, list(leaves)], list, compiled_at_once=True)


def has_mpi4jax() -> bool:
    return importlib.util.find_spec("mpi4jax") is not None


@functools.cache
def refusal() -> str:
    """Return why mpi4jax cannot reduce in device memory; "" if it can."""
    if not has_mpi4jax():
        return "mpi4jax is not installed: see docs/how-to/clusters.md."
    try:
        import mpi4jax
    except Exception as error:  # built for another MPI, for example
        return f"mpi4jax cannot be loaded: {error}."
    if jax.default_backend() == "cpu":
        return ""
    if jax.default_backend() not in ("gpu", "cuda") or not mpi4jax.has_cuda_support():
        return "this build of mpi4jax does not support these devices. Build it with CUDA_ROOT=<toolkit>."
    if os.environ.get(USES_CUDA_MPI, "").lower() not in ("1", "true", "on"):
        return f"mpi4jax copies through host memory. Set {USES_CUDA_MPI}=1, before jdistgrad is imported."
    return trial()


def trial() -> str:
    """Send an array in a separate process, which may crash; return the reason of a failure, or ""."""
    settings, gpus = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, opened_gpus()
    if gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRIAL],
            env=launcher_env.outside_the_job() | settings,
            capture_output=True,
            text=True,
            timeout=TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{WHAT} did not end within {TRIAL_SECONDS:g} s."
    if done.returncode > 0:
        return f"{WHAT} failed: {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}."
    if done.returncode:
        return (
            f"{WHAT} ended with signal {-done.returncode}: this MPI takes no device pointers. Use one built with CUDA."
        )
    return ""
