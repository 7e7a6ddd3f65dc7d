"""A process under mpirun that ends badly takes the job with it: no other rank waits for it for ever."""

import atexit
import sys
from types import TracebackType

from jdistgrad.rpc import current
from jdistgrad.rpc.worker import Worker

_guarded = False


def guard(worker: Worker) -> None:
    """From now on an exception nobody catches, or leaving without ``shutdown``, ends the job with one message."""
    global _guarded
    if worker.size == 1 or _guarded:
        return
    _guarded = True
    previous = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        _abort_if_open(f"failed: {kind.__name__}: {error}")

    sys.excepthook = end_job
    atexit.register(_abort_if_open, "ended without calling jdistgrad.shutdown()")


def _abort_if_open(what: str) -> None:
    worker = current.process_worker()
    if worker is not None and not worker.closed:
        sys.stdout.flush()
        worker.transport.abort(f"{worker.info} {what}")
