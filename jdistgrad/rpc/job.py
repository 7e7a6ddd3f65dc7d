"""A process under mpirun that ends badly takes the job with it: no other rank waits for it for ever."""

import atexit
import sys
from types import TracebackType

from jdistgrad.rpc.worker import Worker
from jdistgrad.wire.mpi import abort_job

_latest: Worker | None = None
_guarded = False


def guard(rank: int) -> None:
    """From now on an exception nobody catches ends the job, with one message; so does leaving without ``shutdown``."""
    global _guarded
    if _guarded:
        return
    _guarded = True
    previous = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        abort_job(f"{_latest.info if _latest else f'rank {rank}'} failed: {kind.__name__}: {error}")

    sys.excepthook = end_job
    atexit.register(_check_end)


def joined(worker: Worker) -> None:
    """The process is this worker from now on."""
    global _latest
    _latest = worker


def _check_end() -> None:
    if _latest is None:
        return
    if not _latest.closed:
        abort_job(f"{_latest.info} ended without calling jdistgrad.shutdown(). Every rank must call it at its end")
    if _latest.peers.hung is not None:
        abort_job(f"{_latest.info} ended, but MPI would wait for {_latest.peers.hung} for ever")
