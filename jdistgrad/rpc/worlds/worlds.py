"""Opening and closing worlds: under mpirun, as threads of one process, in a notebook."""

import contextvars
import gc
import logging
import sys
import threading

from jdistgrad import errors
from jdistgrad._compat import forget_failed_effects
from jdistgrad.rpc import current
from jdistgrad.rpc.calls.caller import checked_timeout
from jdistgrad.rpc.directory import WorkerInfo, checked_name
from jdistgrad.rpc.serving.failures import spelled
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.rpc.worlds.opening import open_local, open_mpi, refuse_second_world
from jdistgrad.wire import launcher_env
from jdistgrad.wire.ids import spell
from jdistgrad.wire.local import Hub

log = logging.getLogger("jdistgrad.rpc")

_collecting = threading.Lock()  # gc.collect does nothing while another thread is in it

# A thread that spawn started: its hub and rank.
_seat: contextvars.ContextVar[tuple[Hub, int] | None] = contextvars.ContextVar("jdistgrad_seat", default=None)


def take_seat(hub: Hub, rank: int) -> None:
    """Let ``init`` in this thread join a local world."""
    current.seat_thread()
    _seat.set((hub, rank))


def init(name: str | None = None, *, timeout: float = 60.0, allow_code: bool = False) -> WorkerInfo:
    """Join the world this program runs in.

    Under mpirun that is the MPI job's; in a thread started by ``spawn``, the local world of it; elsewhere a world of
    one. Every worker of the world must call it, and ``shutdown`` at the end; it returns when all have come.

    Arguments:
      name: this worker's name, unique in the world, of up to 64 printable characters without spaces; default
        ``worker{rank}``.
      timeout: seconds after which an unanswered call fails, where the call does not say; and for the others to come.
      allow_code: let functions that cannot be imported (lambdas, closures, notebook cells) travel by value between
        processes. Every worker must say the same.

    Returns:
      This worker's rank and name.

    Raises:
      AlreadyInitializedError: a world is open here.
      WorldError: a worker is missing, two have one name, or they run different versions or scripts.

    Example:
      >>> me = jd.init()
      >>> if me.rank == 0:
      ...     print(jd.rpc_sync("worker1", jnp.add, args=(1, 2)))
      >>> jd.shutdown()
    """
    refuse_second_world("init")
    forget_failed_effects()
    seconds = checked_timeout(timeout)
    name = None if name is None else checked_name(name)
    seat = _seat.get()
    if seat is not None:
        worker = open_local(*seat, name, seconds, allow_code)
        current.bind_thread(worker)
    elif launcher_env.launched():
        worker = open_mpi(name, seconds, allow_code)
        current.bind_process(worker)
    else:
        worker = open_local(Hub(1), 0, name, seconds, allow_code)
        current.bind_process(worker)
    return worker.info


def shutdown(*, graceful: bool = True, timeout: float | None = None) -> list[str]:
    """Leave the world.

    Every worker of the world must call it. Graceful: go on serving until all have called it and no call is in flight
    anywhere, however deep; then all return together. Where that takes long it says for whom and what it waits, as a
    warning of the logger ``jdistgrad.rpc``. Otherwise: leave now; calls in flight fail, here with WorldClosedError, on
    workers that wait for this one with WorkerLostError.

    Called while an exception is being handled, as in ``try: ... finally: jd.shutdown()``, it prints the traceback and
    leaves: the others may be waiting for what this worker did not do.

    Arguments:
      graceful: whether to wait.
      timeout: how many seconds to wait at most; default no limit. After it the world still stands.

    Returns:
      What was left in this worker's tables, in words: references somebody still held. They are of no use any more.

    Raises:
      NotInitializedError: there is no world.
      CallTimeoutError: it took longer than ``timeout``; the message names the workers that have not called, and what
        is being served.
      WorkerLostError: a worker died meanwhile.
    """
    worker = current_worker()
    failed = failure_being_handled(worker) if graceful else None
    if failed is not None:
        worker.process.report(failed)
        graceful = False
    with _collecting:
        gc.collect()  # references caught in cycles
    try:
        if graceful:
            worker.closing.run(float("inf") if timeout is None else checked_timeout(timeout))
        else:
            worker.peers.leave(why_it_leaves(failed))
    except errors.CallTimeoutError:
        raise
    except BaseException as error:
        worker.peers.leave(f"its shutdown failed: {error}")
        _close(worker, graceful=False)
        raise
    found = leftovers(worker)
    if found:
        log.info("shutdown: %s", describe_leftovers(found))
    _close(worker, graceful=graceful)
    return found


def failure_being_handled(worker: Worker) -> BaseException | None:
    """The exception that this code handles, if it is of this world and keeps the program from its own end."""
    error = sys.exception()
    ends_well = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))
    return None if ends_well or id(error) == worker.handled_before else error


def why_it_leaves(failed: BaseException | None) -> str:
    if failed is None:
        return "it left with shutdown(graceful=False)"
    return f"it left with shutdown() because of {spelled(failed)}"


def worker_info(name: str | None = None) -> WorkerInfo:
    """A worker's rank and name; by default this one's. Raises UnknownWorkerError for a name nobody has."""
    worker = current_worker()
    return worker.info if name is None else worker.directory.find(name)


def launched() -> bool:
    """Whether this program was started as one worker of several: by mpirun, ``spawn`` or ``jdistgrad run --local``.

    Example:
      >>> main() if jd.launched() else jd.spawn(main, 3)
    """
    return _seat.get() is not None or launcher_env.launched()


def world_size() -> int:
    """How many workers the world has."""
    return current_worker().size


def _close(worker: Worker, *, graceful: bool) -> None:
    worker.close(graceful=graceful)
    current.unbind(worker)
    forget_failed_effects()


def leftovers(worker: Worker) -> list[str]:
    """What a worker still holds at its end, in words."""
    references, scopes = worker.references, worker.scopes.identifiers()
    held = [f"{worker.info} still holds a reference to {spell(claim.id)}" for claim in references.claims.held()]
    owned = [f"{worker.info} still owns {spell(identifier)}" for identifier in references.owned.identifiers()]
    return held + owned + [f"{worker.info} still takes part in context {spell(scope)}" for scope in scopes]


def describe_leftovers(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
