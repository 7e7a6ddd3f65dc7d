"""Leaving a world: with all others, alone, or by the end of the process.

A rank of a job that fails ends the job, so that no other rank waits for it for ever. In a world that survives, a rank
that fails notifies the others and then dies by a signal: mpirun takes that for a loss and goes on, whereas it ends the
job when a rank exits with a status other than 0.
"""

import atexit
import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from jdistgrad import errors
from jdistgrad._compat import forget_failed_effects
from jdistgrad.config import settings
from jdistgrad.rpc import current
from jdistgrad.rpc.caller import checked_timeout
from jdistgrad.rpc.failures import in_short, spelled
from jdistgrad.wire import launcher_env
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import spell
from jdistgrad.wire.polling import poll

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker
    from jdistgrad.wire.mpi_job import MPIJob

log = logging.getLogger("jdistgrad.rpc")

_collecting = threading.Lock()  # one worker of this process at a time

TOLD_SECONDS = 2.0  # for the others to receive the reason, before MPI reports the death
KILLED_SECONDS = 5.0  # for MPI to learn that a rank was killed

_latest: "Worker | None" = None
_job: "MPIJob | None" = None
_reported: BaseException | None = None


def shutdown(*, graceful: bool = True, timeout: float | None = None) -> list[str]:
    """Leave the world.

    Every worker of the world must call ``shutdown``. A graceful shutdown goes on serving until all workers have called
    it, no call is in flight anywhere, however deep, and no callback of a call runs; then all return together. If that
    takes long, warnings of the logger ``jdistgrad.rpc`` name the workers and calls that it waits for. A shutdown
    that is not graceful leaves now, and calls in flight fail: here with WorldClosedError, and with WorkerLostError on
    workers that wait for this one.

    Called while an exception is being handled, as in ``try: ... finally: jd.shutdown()``, it prints the traceback and
    leaves without waiting: the other workers may wait for calls that this worker did not make.

    Arguments:
      graceful: whether to wait.
      timeout: how many seconds to wait at most; no limit by default. After a timeout the world is still open.

    Returns:
      A text for each entry left in this worker's tables: references that were still held, values and contexts. They
      are of no use any more. Values that lost workers held are among them.

    Raises:
      NotInitializedError: there is no world.
      ValueError: ``timeout`` is not a positive number. The world is still open.
      CallTimeoutError: the shutdown took longer than ``timeout``; the message names the workers that have not called
        it, and the calls that are being served.
      WorkerLostError: a worker was lost, and the world does not survive that.
      WorldError: a function that another worker has called, or a callback of a call or of ``on_lost``, called this:
        ``shutdown`` would wait for that function to return.
    """
    worker: Worker = current.current_resident()
    failed = _failure(worker) if graceful else None
    if failed is not None:
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


def _failure(worker: "Worker") -> BaseException | None:
    """Return the exception that is being handled, if it is no regular exit, and not older than the world."""
    handled = sys.exception()
    ends_well = isinstance(handled, GeneratorExit) or (isinstance(handled, SystemExit) and handled.code in (None, 0))
    return None if ends_well or handled is worker.handled_before else handled


def _end(worker: "Worker", *, graceful: bool) -> list[str]:
    """Close a worker when the others have been notified. Return a text for each entry that its tables still held."""
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


def close(worker: "Worker", *, graceful: bool) -> None:
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


# The end of a process that has not left its world.


def guard(job: "MPIJob") -> None:
    """Let an uncaught exception, or an exit without ``shutdown``, end the job with one message from now on."""
    global _job
    if _job is not None:
        return
    _job = job
    previous = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not _reported:
            previous(kind, error, trace)
        if _latest is not None and _latest.survives:
            if _latest.closing.told_to_close.is_set():
                launcher_env.leave_note(launcher_env.FAILED)
            _die(_latest, f"it failed: {in_short(error)}")
        else:
            job.end(f"{_latest.info if _latest else f'rank {job.rank}'} failed: {in_short(error)}")

    sys.excepthook = failed
    atexit.register(_check_end)
    os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    """Let a forked process end without its rank's handlers, which would end the job, or wait for the parent in MPI."""
    sys.excepthook = sys.__excepthook__
    atexit.register(os._exit, 0)
    atexit.register(sys.stdout.flush)  # the last that is registered runs first


def report(error: BaseException) -> None:
    """Print the exception that this process fails with, before it waits for others; it is not printed again."""
    global _reported
    _reported = error
    traceback.print_exception(error)
    sys.stderr.flush()


def joined(worker: "Worker") -> None:
    global _latest
    _latest = worker
    launcher_env.leave_note(launcher_env.JOINED)


def _check_end() -> None:
    if _latest is None or _job is None:
        return
    if not _latest.closed and _latest.survives:
        why = "it ended without calling jdistgrad.shutdown()"
        print(f"jdistgrad: {_latest.info} is lost: {why}. Every rank must call it at its end", file=sys.stderr)
        _die(_latest, why)
    if not _latest.closed:
        gave_up = _latest.closing.gave_up
        missed = "without calling jdistgrad.shutdown(). Every rank must call it at its end"
        _job.end(f"{_latest.info} ended {f'before it had left its world: {gave_up}' if gave_up else missed}")
    launcher_env.leave_note(launcher_env.ENDED)
    hung = _hung(_latest)
    if hung:
        _job.end(f"{_latest.info} ended, but MPI would wait for {hung} for ever")


def _die(worker: "Worker", why: str) -> None:
    """Tell the other workers that this one leaves, and why; then end this process like one that is killed."""
    try:
        if not worker.closed:
            worker.peers.leave(why)
            poll(lambda: worker.given_up_by >= worker.peers.others, TOLD_SECONDS)
            if not poll(lambda: worker.given_up_by or not worker.peers.others, settings.silence_seconds):
                for rank in worker.peers.others:  # an mpirun that goes on without the dead leaves these behind
                    worker.transport.kill(rank)
                worker.end_job(
                    f"{worker.info} is lost: {why}; no other worker gave a sign of life, to go on without it"
                )
            hung = "" if worker.peers.others else _hung(worker)
            if hung:
                worker.end_job(f"{worker.info} is lost: {why}; MPI would wait for {hung} for ever")
            worker.close(graceful=False)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or None
                stream.flush()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _hung(worker: "Worker") -> str:
    """Return the names of the workers that were given up for their silence, and that MPI takes to be alive."""
    job = _job

    def silent_and_alive() -> set[int]:
        return worker.peers.silent - job.dead() if job is not None else set()

    if not worker.peers.silent:  # MPI may have ended
        return ""
    if worker.survives:  # another may have killed them just now
        poll(lambda: not silent_and_alive(), KILLED_SECONDS)
    return ", ".join(str(worker.directory.workers[rank]) for rank in sorted(silent_and_alive()))
