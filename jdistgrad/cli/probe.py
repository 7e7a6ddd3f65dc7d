"""The facts about the installation that one process finds; ``doctor`` judges them."""

import importlib.metadata
import importlib.util
import os
import platform
import socket
from typing import Any

from jdistgrad.threads import usable_cores
from jdistgrad.wire import launcher_env

NEEDED = ("jdistgrad", "jax", "jaxlib", "numpy", "flax", "optax", "cloudpickle")
OPTIONAL = ("mpi4py", "mpi4jax")

Facts = dict[str, Any]


def versions() -> dict[str, str | None]:
    return {name: _version(name) for name in (*NEEDED, *OPTIONAL)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def mpi() -> Facts:
    """Return the facts about the MPI library behind mpi4py. Starts MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"error": str(error)}
    return {
        "library": MPI.Get_library_version().split("\x00")[0].splitlines()[0].split(",")[0].strip(),
        "threads": MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        "rank": MPI.COMM_WORLD.rank,
        "size": MPI.COMM_WORLD.size,
        "cannot_survive": cannot_survive(),
        "why_alone": why_alone(),
    }


def why_alone() -> str:
    """Return why MPI finds this process alone, though its launcher has started several; "" if that is not so."""
    from jdistgrad.wire import mpi_process

    return mpi_process.why_alone()


def cannot_survive() -> str:
    """Return why a job of this MPI cannot go on without a rank that dies; "" if it can."""
    from jdistgrad.wire import mpi_failures

    return mpi_failures.missing(started=False)


def devices() -> Facts:
    import jax

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ranks may share a GPU
    try:
        return {"platform": jax.default_backend(), "devices": [str(device) for device in jax.local_devices()]}
    except RuntimeError as error:
        return {"error": str(error)}


def mpi4jax() -> Facts:
    """Check that mpi4jax, if installed, reduces an array over all ranks inside jit. Every rank must call it."""
    if importlib.util.find_spec("mpi4jax") is None:
        return {"missing": True}
    try:
        import jax.numpy as jnp
        from jax import default_device, jit, local_devices
        from mpi4jax import allreduce, has_cuda_support
        from mpi4py import MPI

        with default_device(local_devices(backend="cpu")[0]):  # a GPU's pointers may crash MPI: see on_device
            total = jit(lambda x: allreduce(x, op=MPI.SUM))(jnp.ones(3))
        return {"works": bool((total == MPI.COMM_WORLD.size).all()), "cuda": bool(has_cuda_support())}
    except Exception as error:  # an extension module can fail to load in many ways: all are findings
        return {"error": f"{type(error).__name__}: {error}"}


def on_device() -> str:
    """Return why mpi4jax cannot reduce arrays where they lie; "" if it can."""
    from jdistgrad.data_parallel.collectives import mpi_on_device

    try:
        return mpi_on_device.refusal()
    except RuntimeError as error:  # no device can be opened
        return str(error)


def collect() -> Facts:
    """Return all facts about this process. Every rank must call it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mpi4jax warns of every jax newer than itself
        return {
            "host": socket.gethostname(),
            "launched": launcher_env.launched(),
            "python": platform.python_version(),
            "versions": versions(),
            "mpi": mpi(),
            "devices": devices(),
            "mpi4jax": mpi4jax(),
            "on_device": on_device(),
            "cores": len(usable_cores()),
        }
