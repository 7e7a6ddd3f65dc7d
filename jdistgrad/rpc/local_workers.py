"""Worlds inside one process: programs as threads (``spawn``), and workers that help a notebook (``local_workers``)."""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdistgrad import errors
from jdistgrad.ffi.dispatch import provide_threads
from jdistgrad.rpc import current
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.current import seat
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.leaving import close, shutdown
from jdistgrad.rpc.worker import Worker, find_worker
from jdistgrad.rpc.worlds import open_local, refuse_second_world
from jdistgrad.threads import started, stop
from jdistgrad.wire.interrupts import put_off_interrupt, wait_in_slices
from jdistgrad.wire.local import Hub
from jdistgrad.wire.message import MAX_WORKERS

log = logging.getLogger("jdistgrad.rpc")


def spawn(main: Callable[..., Any], n: int, *, args: Sequence[Any] = ()) -> list[Any]:
    """Run a program as ``n`` workers, each a thread of this process.

    Arguments:
      main: the program; it calls ``init`` and ``shutdown`` itself, as it would under mpirun.
      n: the number of workers.
      args: the arguments of every ``main``.

    Returns:
      The result of each ``main``, by rank.

    Raises:
      Exception: the first ``main`` that failed raised it; the waits of the others end at once.
      KeyboardInterrupt: Ctrl-C, which stops every ``main``; as does what another signal's handler raises.
      WorldError: a ``main`` returned without ``shutdown``.

    Example:
      >>> def main():
      ...     me = jd.init()
      ...     answer = jd.rpc_sync((me.rank + 1) % 3, jnp.square, args=(me.rank,))
      ...     jd.shutdown()
      ...     return int(answer)
      >>> jd.spawn(main, 3)
      [0, 1, 4]
    """
    provide_threads()
    hub = Hub(checked_size(n))
    results: list[Any] = [None] * n
    failures: list[BaseException] = []
    ended = [threading.Event() for _ in range(n)]  # where Ctrl-C ends a join, Python 3.11 takes the thread for ended

    def run(rank: int) -> None:
        try:
            seat.set((hub, rank))
            results[rank] = main(*args)
            _check_left(rank)
        except BaseException as error:
            failures.append(error)
            error.add_note(f"raised by the main of rank {rank} of spawn")
            hub.fail(errors.WorkerLostError(f"the main of rank {rank} failed: {in_short(error)}", worker=rank))
            worker = find_worker()
            if worker is not None and not worker.closed:  # its threads end; later worlds use what it has compiled
                worker.close(graceful=False)
        finally:
            ended[rank].set()

    threads = [started(run, f"rank{rank}", rank) for rank in range(n)]
    try:
        for rank in range(n):
            wait_in_slices(ended[rank].wait)
            threads[rank].join()
    except BaseException as error:  # Ctrl-C, or what another handler of a signal raises
        hub.fail(errors.WorldClosedError(f"spawn was interrupted by {in_short(error)}"))
        stop(threads)
        raise
    if failures:
        raise failures[0]
    return results


def _check_left(rank: int) -> None:
    """Raise WorldError if the program that has returned on this thread has not left its world."""
    worker = find_worker()
    if worker is not None and not worker.closed:
        gave_up = worker.closing.gave_up
        how = f"before it had left its world: {gave_up}" if gave_up else "without shutdown(). Call it at its end."
        raise errors.WorldError(f"the main of rank {rank} returned {how}", worker=rank)


class LocalWorkers(contextlib.AbstractContextManager["LocalWorkers"]):
    """A local world whose worker 0 is the caller; ``local_workers`` opens one."""

    def __init__(self, n: int, timeout: float):
        provide_threads()
        hub = Hub(n)
        worker: Worker | None = None
        try:
            with put_off_interrupt():  # in its midst even ``Thread.start`` would leave a lock in disorder
                self._servers = [started(_serve, f"worker{rank}", hub, rank, timeout) for rank in range(1, n)]
                worker = open_local(hub, 0, None, timeout)
                current.bind_process(worker)
        except BaseException as error:  # the servers would wait for this worker
            hub.fail(errors.WorkerLostError(f"worker0 has opened no world: {in_short(error)}", worker=0))
            if worker is not None:
                close(worker, graceful=False)
            raise
        self._worker = worker

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return all workers, the caller first."""
        return self._worker.directory.workers

    def __repr__(self) -> str:
        names = ", ".join(worker.name for worker in self.workers[:4]) + (", ..." if len(self.workers) > 4 else "")
        return f"LocalWorkers({len(self.workers)}: {names}{'; closed' if self._worker.closed else ''})"

    def close(self) -> None:
        """End the world; the same as ``jdistgrad.shutdown()``. A second call does nothing."""
        if not self._worker.closed:
            shutdown()
            for server in self._servers:
                server.join()

    def __exit__(self, *exception: Any) -> None:
        self.close()


def _serve(hub: Hub, rank: int, timeout: float) -> None:
    worker: Worker | None = None
    try:
        worker = open_local(hub, rank, None, timeout)
        worker.closing.run(float("inf"), only_serves=True)
    except errors.WorkerLostError as lost:
        log.info("the local worker of rank %d ends: %s", rank, in_short(lost))
    finally:
        if worker is not None:
            worker.close(graceful=True)


def local_workers(n: int, *, timeout: float = 60.0) -> LocalWorkers:
    """Open a world of ``n`` workers in this process: the caller is worker0, the others serve.

    For notebooks and interactive work. The world stays open until ``close()``, ``shutdown()`` or the end of the
    ``with`` block.

    Raises:
      AlreadyInitializedError: a world is already open here, or this program is a worker of ``jdistgrad run --local``.

    Example:
      >>> with jd.local_workers(3):
      ...     print(jd.rpc_sync("worker2", jnp.add, args=(1, 2)))
      3
    """
    refuse_second_world("local_workers")
    place = seat.get()
    if place is not None:
        raise errors.AlreadyInitializedError(
            f"local_workers: this program is already a worker (rank {place[1]}) of a local world, that of `jdistgrad "
            "run --local` or jdistgrad.spawn. Call jdistgrad.init() here; or run it by plain python, as one program."
        )
    size, seconds = checked_size(n), checked_timeout(timeout)
    return LocalWorkers(size, seconds)


def checked_size(n: Any) -> int:
    if isinstance(n, int | np.integer) and 0 < n < MAX_WORKERS:
        return int(n)
    raise ValueError(f"a world has from 1 to {MAX_WORKERS - 1} workers, not {n!r}")
