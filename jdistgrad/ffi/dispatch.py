"""Select the threads on which JAX runs compiled programs for CPUs: the calling thread, or XLA's pool.

JAX hands all but the smallest programs to a pool with as many threads as cores. A program that waits for another worker
keeps its pool thread, so a request of another worker may find no free thread. A program on the calling thread blocks
only its caller. JAX reads the option that selects the calling thread (``OPTION``) once, when it opens its devices.

Programs whose arguments are still being copied run in the pool all the same. In a local world each worker may have such
a program that waits for the other workers, so the pool is enlarged.
"""

import contextlib
import os

import jax

from jdistgrad._compat import backends_are_initialized
from jdistgrad.threads import OWN_POOL, POOL, usable_cores

OPTION = "jax_cpu_enable_async_dispatch"
THREADS = 32  # this many slow down products of large matrices by 3 % on two cores

# Notes on the errors of programs that waited until a timeout.
HELD_A_THREAD = (
    "The program that waited held one of XLA's threads: once all are held, no request of other workers is computed "
    f"here. Set the environment variable {POOL} to a larger number (jdistgrad run sets it to a rank's share of the "
    "cores), and import jdistgrad after jax, before the first array is made: programs then run on the threads that "
    f"call them, and outside of a job XLA has {THREADS} threads."
)
ON_DEVICES = (
    "A program on {} devices waited for it. XLA runs one multi-device program of a process at a time: if the awaited "
    "call runs another one in this process, neither ends. Use jdistgrad.jit in place of jax.jit, which makes calls "
    "between programs, or programs on one device."
)


def run_programs_where_they_are_called() -> None:
    """Set the option, unless JAX has opened its devices."""
    if not backends_are_initialized():
        jax.config.update(OPTION, False)


def provide_threads() -> None:
    """Make XLA's pool large enough for local worlds, unless JAX has opened its devices or the user has set the size."""
    if not backends_are_initialized() and POOL not in os.environ:
        os.environ[POOL] = os.environ[OWN_POOL] = str(max(THREADS, len(usable_cores())))


def finish_programs() -> None:
    """Wait for the programs with ordered effects that this thread has called."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the users of the results see the error
        jax.effects_barrier()
