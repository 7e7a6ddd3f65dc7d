"""Leaving a world: with all others, or alone."""

import gc
import logging
import math
import sys
import threading

from jdistgrad import errors
from jdistgrad._compat import forget_failed_effects
from jdistgrad.rpc import current
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.failures import in_short, spelled
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import spell

log = logging.getLogger("jdistgrad.rpc")

_collecting = threading.Lock()  # one worker of this process at a time


def shutdown(*, graceful: bool = True, timeout: float | None = None) -> list[str]:
    """Leave the world.

    Every worker of the world must call ``shutdown``. A graceful shutdown goes on serving until all workers have called
    it, no call is in flight anywhere, however deep, and no callback of a call runs; then all return together. If that
    takes long, warnings of the logger ``jdistgrad.rpc`` tell which workers and calls it waits for. A shutdown that is
    not graceful leaves now, and calls in flight fail: here with WorldClosedError, and with WorkerLostError on workers
    that wait for this one.

    Called while an exception is being handled, as in ``try: ... finally: jd.shutdown()``, it prints the traceback and
    leaves without waiting: the other workers may wait for calls that this worker did not make.

    Arguments:
      graceful: whether to wait.
      timeout: how many seconds to wait at most; no limit by default. After a timeout the world is still open.

    Returns:
      A text for each entry left in this worker's tables: references that were still held, values and contexts. They
      are of no use any more.

    Raises:
      NotInitializedError: there is no world.
      ValueError: ``timeout`` is not a positive number. The world is still open.
      CallTimeoutError: the shutdown took longer than ``timeout``; the message names the workers that have not called
        it, and the calls that are being served.
      WorkerLostError: a worker was lost, and the world does not survive that.
      WorldError: a function that another worker has called, or a callback of a call or of ``on_lost``, called this:
        ``shutdown`` would wait for that function to return.
    """
    worker = current_worker()
    handled = sys.exception()
    ends_well = isinstance(handled, GeneratorExit) or (isinstance(handled, SystemExit) and handled.code in (None, 0))
    failed = None if not graceful or ends_well or handled is worker.handled_before else handled
    if failed is not None:  # not older than the world, and no regular exit
        worker.report(failed)
        graceful = False
    seconds = math.inf
    if graceful:
        if running := worker.running_here():
            raise errors.WorldError(
                f"shutdown of {worker.info}: this thread serves {running[0]}, and shutdown would wait until that "
                "returns. Let the function set a flag, and call shutdown in the program that called init."
            )
        seconds = seconds if timeout is None else checked_timeout(timeout)
    try:
        _collect_garbage()  # drops references that are caught in cycles
        if graceful:
            worker.closing.run(seconds)
        elif failed is None:
            worker.peers.leave("it left with shutdown(graceful=False)")
        else:
            worker.peers.leave(f"it left with shutdown() because of {in_short(failed)}")
    except errors.CallTimeoutError:
        raise
    except BaseException as error:
        if not worker.closed:
            try:
                worker.peers.leave(f"its shutdown failed: {spelled(error)}")
            finally:
                close(worker, graceful=False)
            forget_failed_effects()
        raise
    return _end(worker, graceful=graceful)


def _end(worker: Worker, *, graceful: bool) -> list[str]:
    """Close a worker when the others have been told. Return a text for each entry that its tables still held."""
    references, scopes = worker.references, worker.scopes.identifiers()
    found = [f"{worker.info} still holds a reference to {spell(claim.id)}" for claim in [*references.claims.values()]]
    found += [f"{worker.info} still owns {spell(identifier)}" for identifier in [*references.owned.entries]]
    found += [f"{worker.info} still takes part in context {spell(scope)}" for scope in scopes]
    if found:
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        log.info("shutdown: %s", shown)
    if worker.refused:
        text = "shutdown of %s: messages refused or too late: %d, by the rank that sent them: %s"
        log.info(text, worker.info, worker.refused.total(), dict(worker.refused))
    if graceful and worker.peers.lost and worker.rank == worker.closing.conductor:
        log.warning("the world went on without lost workers: %s", "; ".join(worker.peers.lost.values()))
    close(worker, graceful=graceful)
    forget_failed_effects()
    return found


def close(worker: Worker, *, graceful: bool) -> None:
    """Close a worker. A world that is half closed could be neither used nor left."""
    with put_off_interrupt():
        worker.close(graceful=graceful)
        current.unbind(worker)


def _collect_garbage() -> None:
    """Collect all garbage. ``gc.collect`` does nothing while another thread collects, perhaps only what is young."""
    with _collecting:
        before = gc.get_stats()[2]["collections"]
        while gc.get_stats()[2]["collections"] == before:
            gc.collect()
