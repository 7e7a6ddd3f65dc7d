"""Where JAX runs compiled programs on CPUs: on the thread that calls them, or on a few threads of XLA's.

JAX hands all but the smallest programs to a pool with as many threads as cores. A program that waits for another worker
keeps its thread, and what the others ask of this process meanwhile may find none. Run by who calls them, programs wait
on threads of which there are always enough. JAX reads the option once, when it opens its devices.

It does not hold for programs whose arguments are still being copied: these run in the pool when the copy is there.
Where workers are threads of one process, each may have such a program that waits for the others: so it is enlarged.
"""

import logging
import os
import threading

import jax

from jdistgrad._compat import backends_are_initialized

OPTION = "jax_cpu_enable_async_dispatch"
POOL = "NPROC"  # what XLA asks for the size of its pools, before it counts cores
THREADS = 32  # they cost products of large matrices 3 % on two cores

log = logging.getLogger("jdistgrad.ffi")


def run_programs_where_they_are_called() -> None:
    """Set the option, unless JAX has opened its devices."""
    if not backends_are_initialized():
        jax.config.update(OPTION, False)


def provide_threads() -> None:
    """Make XLA's pool large enough for local worlds, unless JAX has opened its devices or somebody has chosen."""
    if not backends_are_initialized():
        os.environ.setdefault(POOL, str(max(THREADS, len(os.sched_getaffinity(0)))))


class Crowd:
    """How many programs wait for other workers on XLA's threads; says once when they may have taken all of them."""

    def __init__(self) -> None:
        self._count, self._told, self._lock = 0, False, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            count, told = self._count, self._told
        if not told and count >= pool_size():
            self._told = True
            log.warning(
                "%d compiled programs wait for other workers, and XLA has no more threads here: what is asked of this "
                "process meanwhile may wait for them in vain. Set the environment variable %s to a larger number, and "
                "import jdistgrad behind jax, before the first array is made: it tells JAX to run programs where they "
                "are called, and XLA to have %d threads.",
                count,
                POOL,
                THREADS,
            )

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1


def pool_size() -> int:
    """How many threads XLA has for programs on CPUs."""
    reserved = os.environ.get(POOL, "")
    cores = int(reserved) if reserved.isdigit() else len(os.sched_getaffinity(0))
    return max(1, cores, len(jax.local_devices(backend="cpu")))
