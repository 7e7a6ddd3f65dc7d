"""Opening and closing worlds: under mpirun, as threads of one process, in a notebook."""

import contextvars
import gc
import logging
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad import errors
from jdistgrad._version import __version__
from jdistgrad.rpc import current, devices
from jdistgrad.rpc.closing import Closing, describe_leftovers, leftovers
from jdistgrad.rpc.codec import Codec
from jdistgrad.rpc.directory import Hello, WorkerInfo, agree
from jdistgrad.rpc.worker import Worker, checked_timeout
from jdistgrad.wire import rollcall
from jdistgrad.wire.ids import MAX_WORKERS
from jdistgrad.wire.local import Hub, LocalTransport

log = logging.getLogger("jdistgrad.rpc")

_collecting = threading.Lock()  # gc.collect does nothing while another thread is in it

# A thread that spawn started: its hub and rank.
_seat: contextvars.ContextVar[tuple[Hub, int] | None] = contextvars.ContextVar("jdistgrad_seat", default=None)


def init(name: str | None = None, *, timeout: float = 60.0, allow_code: bool = False) -> WorkerInfo:
    """Join the world this program runs in.

    Under mpirun that is the MPI job's; in a thread started by ``spawn``, the local world of it; elsewhere a world of
    one. Every worker of the world must call it, and ``shutdown`` at the end; it returns when all have come.

    Arguments:
      name: this worker's name, unique in the world; default ``worker{rank}``.
      timeout: seconds after which an unanswered call fails, where the call does not say; and for the others to come.
      allow_code: let functions that cannot be imported (lambdas, closures, notebook cells) travel by value between
        processes. Every worker must say the same.

    Returns:
      This worker's rank and name.

    Raises:
      AlreadyInitializedError: a world is open here.
      WorldError: a worker is missing, two have one name, or they disagree.

    Example:
      >>> me = jd.init()
      >>> if me.rank == 0:
      ...     print(jd.rpc_sync("worker1", jnp.add, args=(1, 2)))
      >>> jd.shutdown()
    """
    _refuse_second_world("init")
    seconds = checked_timeout(timeout)
    seat = _seat.get()
    if seat is not None:
        worker = _open_local(*seat, name, seconds, allow_code)
        current.bind_thread(worker)
    elif rollcall.launched():
        worker = _open_mpi(name, seconds, allow_code)
        current.bind_process(worker)
    else:
        worker = _open_local(Hub(1), 0, name, seconds, allow_code)
        current.bind_process(worker)
    return worker.info


def shutdown(*, graceful: bool = True, timeout: float | None = None) -> list[str]:
    """Leave the world.

    Every worker of the world must call it. Graceful: go on serving until all have called it and no call is in flight
    anywhere, however deep; then all return together. Otherwise: leave now; calls in flight fail, here with
    WorldClosedError, on workers that wait for this one with WorkerLostError.

    Arguments:
      graceful: whether to wait.
      timeout: how many seconds to wait at most; default no limit. After it the world still stands.

    Returns:
      What was left in this worker's tables, in words: references somebody still held. They are of no use any more.

    Raises:
      NotInitializedError: there is no world.
      CallTimeoutError: it took longer than ``timeout``; the message names the workers that have not called.
      WorkerLostError: a worker died meanwhile.
    """
    worker = current.current_worker()
    with _collecting:
        gc.collect()  # references caught in cycles
    try:
        if graceful:
            worker.closing.run(float("inf") if timeout is None else checked_timeout(timeout))
        else:
            worker.leave("it left with shutdown(graceful=False)")
    except errors.CallTimeoutError:
        raise
    except BaseException:
        _close(worker, graceful=False)
        raise
    found = leftovers(worker)
    if found:
        log.info("shutdown: %s", describe_leftovers(found))
    _close(worker, graceful=graceful)
    return found


def spawn(main: Callable[..., Any], n: int, *, args: Sequence[Any] = ()) -> list[Any]:
    """Run a program as ``n`` workers, each a thread of this process.

    Arguments:
      main: the program; it calls ``init`` and ``shutdown`` itself, as it would under mpirun.
      n: how many workers.
      args: what every ``main`` is called with.

    Returns:
      What each ``main`` returned, by rank.

    Raises:
      Exception: what the first ``main`` that failed raised; the others' waits end at once.
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
    hub = Hub(checked_size(n))
    results: list[Any] = [None] * n
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        current.seat_thread()
        _seat.set((hub, rank))
        try:
            results[rank] = main(*args)
            _require_shutdown(rank)
        except BaseException as error:
            error.add_note(f"raised by the main of rank {rank} of spawn")
            failures.append(error)
            hub.fail(errors.WorkerLostError(f"the main of rank {rank} failed: {spelled(error)}", worker=rank))

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        hub.fail(errors.WorldClosedError("spawn was interrupted"))
        raise
    if failures:
        raise failures[0]
    return results


class LocalWorkers:
    """A local world whose worker 0 is the caller; what ``local_workers`` returns."""

    def __init__(self, n: int, timeout: float, allow_code: bool):
        hub = Hub(n)
        self._servers = [
            threading.Thread(target=self._serve, args=(hub, rank, timeout), name=f"worker{rank}", daemon=True)
            for rank in range(1, n)
        ]
        for server in self._servers:
            server.start()
        self._worker = _open_local(hub, 0, None, timeout, allow_code)
        current.bind_process(self._worker)

    @staticmethod
    def _serve(hub: Hub, rank: int, timeout: float) -> None:
        worker = _open_local(hub, rank, None, timeout, False)
        worker.closing.run(float("inf"))
        worker.close(graceful=True)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Everybody, the caller first."""
        return self._worker.directory.workers

    def close(self) -> None:
        """End the world; the same as ``jdistgrad.shutdown()``. A second call does nothing."""
        if not self._worker.closed:
            shutdown()
            for server in self._servers:
                server.join()

    def __enter__(self) -> "LocalWorkers":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


def local_workers(n: int, *, timeout: float = 60.0) -> LocalWorkers:
    """Open a world of ``n`` workers in this process: the caller is worker0, the others serve.

    For notebooks and interactive work. It stands until ``close()``, ``shutdown()`` or the end of the ``with`` block.

    Example:
      >>> with jd.local_workers(3):
      ...     print(jd.rpc_sync("worker2", jnp.add, args=(1, 2)))
      3
    """
    _refuse_second_world("local_workers")
    return LocalWorkers(checked_size(n), checked_timeout(timeout), True)


def worker_info(name: str | None = None) -> WorkerInfo:
    """A worker's rank and name; by default this one's. Raises UnknownWorkerError for a name nobody has."""
    worker = current.current_worker()
    return worker.info if name is None else worker.directory.find(name)


def world_size() -> int:
    """How many workers the world has."""
    return current.current_worker().size


def checked_size(n: Any) -> int:
    if isinstance(n, int) and 0 < n < MAX_WORKERS:
        return n
    raise ValueError(f"a world has from 1 to {MAX_WORKERS - 1} workers, not {n!r}")


def spelled(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse_second_world(what: str) -> None:
    worker = current.find_worker()
    if worker is not None:
        raise errors.AlreadyInitializedError(
            f"{what}: {worker.info} is already in a world of {worker.size}. Call jdistgrad.shutdown() first."
        )


def _open_local(hub: Hub, rank: int, name: str | None, timeout: float, allow_code: bool) -> Worker:
    meeting = hub.next_meeting(rank)
    hellos = meeting.gather(rank, _hello(name, rank, allow_code), timeout)
    transport, device = LocalTransport(meeting, rank), devices.device_of_local_worker(rank)
    return _open(hellos, rank, transport, allow_code, timeout, device)


def _open_mpi(name: str | None, timeout: float, allow_code: bool) -> Worker:
    from mpi4py import MPI

    from jdistgrad.rpc import job
    from jdistgrad.wire.mpi import MPITransport, require_threads

    require_threads()
    comm = MPI.COMM_WORLD
    devices.take_process_device(rollcall.local_rank())
    hellos = rollcall.gather(comm, _hello(name, comm.rank, allow_code), timeout)
    transport = MPITransport(rollcall.duplicate(comm, timeout), Codec(allow_code=allow_code))
    worker = _open(hellos, comm.rank, transport, allow_code, timeout, None)
    job.guard(worker)
    return worker


def _hello(name: str | None, rank: int, allow_code: bool) -> Hello:
    return Hello(name or f"worker{rank}", uuid.uuid4().hex, __version__, allow_code)


def _open(hellos: list[Hello], rank: int, transport: Any, allow_code: bool, timeout: float, device: Any) -> Worker:
    codec = Codec(allow_code=allow_code)
    worker = Worker(hellos[0].world, rank, agree(hellos), transport, codec, timeout=timeout, device=device)
    worker.closing = Closing(worker)
    transport.start(worker)
    return worker


def _close(worker: Worker, *, graceful: bool) -> None:
    worker.close(graceful=graceful)
    current.unbind(worker)


def _require_shutdown(rank: int) -> None:
    worker = current.find_worker()
    if worker is not None and not worker.closed:
        raise errors.WorldError(
            f"the main of rank {rank} returned without shutdown(). Call jdistgrad.shutdown() at its end.", worker=rank
        )
