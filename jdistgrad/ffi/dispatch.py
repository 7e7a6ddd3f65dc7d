"""The threads on which JAX runs compiled programs for CPUs: the calling thread, or XLA's pool.

JAX hands all but the smallest programs to a pool with as many threads as cores. A program that waits for another worker
keeps its pool thread, so a request that another worker makes meanwhile may find no free thread. A program that runs on
the calling thread waits there, and there are always enough such threads. The option that selects the calling thread
(``OPTION``) is read once, when JAX opens its devices.

The option does not apply to programs whose arguments are still being copied: they run in the pool after the copy. In a
local world each worker may have such a program that waits for the other workers, so the pool is enlarged.
"""

import contextlib
import os

import jax

from jdistgrad._compat import backends_are_initialized
from jdistgrad.threads import OWN_POOL, POOL, usable_cores

OPTION = "jax_cpu_enable_async_dispatch"
THREADS = 32  # this many slow down products of large matrices by 3 % on two cores

# What may be the cause where a program has waited in vain.
HELD_A_THREAD = (
    "The program that waited held one of XLA's threads: with all of them held, nothing that other workers request is "
    f"computed here. Set the environment variable {POOL} to a larger number (jdistgrad run sets it to a rank's share "
    "of the cores), and import jdistgrad after jax, before the first array is made: jdistgrad then tells JAX to run "
    "programs on the threads that call them, and, in a program that was not started as a job, XLA to have "
    f"{THREADS} threads."
)
ON_DEVICES = (
    "A program on {} devices waited for it. XLA runs one program on several devices of a process at a time: if what it "
    "waited for runs another one in this process, neither ends. jdistgrad.jit in place of jax.jit makes calls between "
    "programs; programs on one device do not keep others from running."
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
    """Wait for the programs with ordered effects that this thread has called, also where XLA runs them on its own."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # which those see that use the results
        jax.effects_barrier()
