"""Collectives over MPI that reduce arrays where they lie: mpi4jax in compiled code, given pointers to device memory."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdistgrad import jaxprs
from jdistgrad.collectives.spanning import Finish, Program
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.devices import opened_gpus
from jdistgrad.wire import launcher_env
from jdistgrad.wire.arrays import as_jax_array

TRIAL_SECONDS = 60.0
WHAT = "a send of a device array, tried in a process of its own,"
USES_CUDA_MPI = "MPI4JAX_USE_CUDA_MPI"

# A send to itself, with the buffers of a program on JAX's default device. An MPI that cannot read their memory crashes.
TRIAL = """
import jax, jax.numpy as jnp, mpi4jax
from mpi4py import MPI
x = jnp.arange(1 << 20, dtype=jnp.float32)
y = jax.jit(lambda x: mpi4jax.sendrecv(x, x, 0, 0, comm=MPI.COMM_SELF))(x)
if not (x == y).all():
    raise ValueError("other numbers came than were sent")
"""


def require_support(reasons: Sequence[str]) -> None:
    """Raise CollectiveError if some rank has a reason why its arrays cannot be reduced where they lie."""
    for rank, reason in enumerate(reasons):
        if reason:
            raise CollectiveError(
                f"MPI(on_device=True): rank {rank}: {reason} Without on_device=True gradients go through host memory."
            )


def rank_program(all_: Any, closed: Any, finish: Finish, what: str) -> Program:
    """Return a program of this rank's arrays, ``closed``, that ends with reductions over all ranks, ``finish``."""
    # Constants are arguments, not copied into the compiled code; a copy, since the program may change them later.
    constants, first = [as_jax_array(const) for const in closed.consts], len(closed.jaxpr.invars)

    def run(constants: list[Any], leaves: list[Any]) -> tuple[list[Any], jax.Array]:
        results = jaxprs.evaluate(closed.jaxpr, constants, leaves[:first])
        with all_.section(what) as inside:
            return finish(inside, results, *leaves[first:]), jnp.zeros((), jnp.int8)

    def arguments(leaves: Sequence[Any]) -> list[Any]:
        return [constants, list(leaves)]

    return Program(jax.jit(run), arguments, list, compiled_at_once=True)  # the ranks' programs may differ


def has_mpi4jax() -> bool:
    return importlib.util.find_spec("mpi4jax") is not None


@functools.cache
def refusal() -> str:
    """Return why mpi4jax cannot reduce arrays where they lie; "" if it can."""
    if not has_mpi4jax():
        return "mpi4jax is not installed: see docs/how-to/clusters.md."
    try:
        import mpi4jax
    except Exception as error:  # built for another MPI, for example
        return f"mpi4jax cannot be loaded: {error}."
    if jax.default_backend() == "cpu":
        return ""
    if jax.default_backend() not in ("gpu", "cuda") or not mpi4jax.has_cuda_support():
        return "this build of mpi4jax has no part for these devices. Build it with CUDA_ROOT=<toolkit>."
    if os.environ.get(USES_CUDA_MPI, "").lower() not in ("1", "true", "on"):
        return f"mpi4jax copies through host memory. Set {USES_CUDA_MPI}=1, before jdistgrad is imported."
    return trial()


def trial() -> str:
    """Send an array in a process of its own; return what went wrong, or "".

    An MPI that does not take device pointers crashes the process that gives it one.
    """
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
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"{WHAT} failed: {said}."
    if done.returncode:
        return (
            f"{WHAT} ended with signal {-done.returncode}: this MPI does not take device pointers, or not these. Use "
            "an MPI that is built with CUDA."
        )
    return ""
