"""The current world, as the collectives use it: its lost workers, blocks inside MPI, errors that name them."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from jdistgrad import errors
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire.polling import poll

TOLD_SECONDS = 1.0
FOR_ANY_WORLD = "Use jdistgrad.collectives.of_this_world(), which DataParallel() does by itself."


def block_in_mpi(
    worker: Any, entry: CollectiveEntry, ranks: Sequence[int], interrupt: Callable[[], None] | None
) -> WatchedBlock:
    """Return a block of an operation of MPI, whose errors name the workers that are lost.

    Arguments:
      interrupt: ends the operation on all ranks, if they can go on without those that are lost.
    """

    def explain(error: Exception) -> None:
        raise_lost(error, ranks, entry.what, patient=interrupt is None)

    return WatchedBlock(worker, entry, ranks, blocking=True, interrupt=interrupt, explain=explain)


def raise_lost(error: Exception, ranks: Sequence[int], what: str, *, patient: bool = True) -> None:
    """Raise WorkerLostError if an error of MPI comes from the loss of a worker among these ranks; else return.

    Where the world does not go on without a worker, it raises the error that has broken the world.

    Arguments:
      patient: wait for the name of the lost worker.
    """
    worker = find_worker()
    if worker is None or not type(error).__module__.startswith("mpi4py"):
        return
    if not worker.survives:
        poll(lambda: not is_failure(error) or worker.failure is not None, TOLD_SECONDS)
        if isinstance(worker.failure, errors.WorkerLostError):
            raise worker.failure.with_traceback(None) from error
        return
    if patient:
        poll(lambda: lost_among(ranks), TOLD_SECONDS)  # another thread is about to find out
    elif is_failure(error) and not lost_among(ranks):
        text = f"{worker.info} ({what}): a rank has died, or has given this operation up since another has died"
        raise errors.WorkerLostError(text) from error
    raise_if_lost(ranks, what, error)


def raise_if_lost(ranks: Sequence[int], what: str, error: Exception | None = None) -> None:
    """Raise WorkerLostError, because of an error of MPI if there is one, if some worker among these ranks is lost."""
    worker, lost = find_worker(), lost_among(ranks)
    if worker is not None and lost:
        text = f"{worker.info} ({what}): {worker.peers.lost[lost[0]]}. Collectives do not go on without it."
        raise errors.WorkerLostError(text, worker=worker.directory.workers[lost[0]]) from error


def lost_among(ranks: Sequence[int]) -> list[int]:
    """Return those of these ranks that this world goes on without."""
    worker = find_worker()
    return sorted(worker.peers.lost.keys() & set(ranks)) if worker is not None and worker.survives else []


def names_of(ranks: Sequence[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in ranks)


def is_failure(error: Exception) -> bool:
    """Return whether an error is one of MPI that may come from the death of a rank."""
    if not type(error).__module__.startswith("mpi4py"):
        return False
    from jdistgrad.wire import mpi_failures

    return mpi_failures.is_failure(cast("Any", error))


def is_local(worker: Worker) -> bool:
    """Return whether a worker's world needs no MPI: its workers are threads of one process, or there is only one."""
    return worker.shares_process or worker.size == 1
