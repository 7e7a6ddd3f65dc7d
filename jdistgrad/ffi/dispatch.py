"""Where JAX runs compiled programs on CPUs: on the thread that calls them, or on a few threads of XLA's.

JAX hands all but the smallest programs to a pool with as many threads as cores. A program that waits for another worker
keeps its thread, and what the others ask of this process meanwhile may find none. Run by who calls them, programs wait
on threads of which there are always enough. JAX reads the option once, when it opens its devices.
"""

import logging
import os
import threading

import jax

from jdistgrad._compat import backends_are_initialized, configured

OPTION = "jax_cpu_enable_async_dispatch"

log = logging.getLogger("jdistgrad.ffi")


def run_programs_where_they_are_called() -> None:
    """Set the option, unless JAX has opened its devices."""
    if not backends_are_initialized():
        jax.config.update(OPTION, False)


class Crowd:
    """How many programs of this process wait for others; says once when they may have taken all threads."""

    def __init__(self) -> None:
        self._count, self._told, self._lock = 0, False, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            count, told = self._count, self._told
        if not told and uses_pool() and count >= pool_size():
            self._told = True
            log.warning(
                "%d compiled programs wait for other workers, and XLA has no more threads here: what is asked of this "
                "process meanwhile may wait for them in vain. Give JAX as many CPU devices as there are workers "
                "(jax_num_cpu_devices) or only one; and if arrays are made before jdistgrad is imported, import it "
                "behind jax: it tells JAX to run programs where they are called, before the first array.",
                count,
            )

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1


def uses_pool() -> bool:
    """Whether programs may run on XLA's threads: of several devices those do whose arguments come from another one."""
    return bool(configured(OPTION)) or len(jax.local_devices(backend="cpu")) > 1


def pool_size() -> int:
    """How many threads XLA has for programs on CPUs."""
    reserved = os.environ.get("NPROC", "")
    cores = int(reserved) if reserved.isdigit() else len(os.sched_getaffinity(0))
    return max(1, cores, len(jax.local_devices(backend="cpu")))
