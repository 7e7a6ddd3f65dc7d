"""The exit of ranks of a job: one that fails ends the job, so that no other rank waits for it for ever.

In a world that survives, a rank that fails tells the others and then dies by a signal: mpirun takes that for a loss and
goes on, whereas it ends the job before its time when a rank exits with a status other than 0.
"""

import atexit
import contextlib
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from jdistgrad.config import settings
from jdistgrad.rpc.failures import in_short
from jdistgrad.wire import launcher_env
from jdistgrad.wire.polling import poll
from jdistgrad.wire.transport import Job

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

TOLD_SECONDS = 2.0  # for the others to receive the reason, before MPI tells them of the death
KILLED_SECONDS = 5.0  # for MPI to learn that a rank was killed

_latest: "Worker | None" = None
_job: Job | None = None
_reported: BaseException | None = None


def guard(job: Job) -> None:
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
            poll(lambda: worker.given_up_by >= others_of(worker), TOLD_SECONDS)
            if not poll(lambda: worker.given_up_by or not others_of(worker), settings.silence_seconds):
                for rank in others_of(worker):  # an mpirun that goes on without the dead leaves these behind
                    worker.transport.kill(rank)
                worker.end_job(
                    f"{worker.info} is lost: {why}; no other worker gave a sign of life, to go on without it"
                )
            hung = "" if others_of(worker) else _hung(worker)
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


def others_of(worker: "Worker") -> set[int]:
    return set(range(worker.size)) - {worker.rank, *worker.peers.lost}
