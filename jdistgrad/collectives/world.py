"""Lost workers of the current world, errors that name them, and communicators of its ranks."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from jdistgrad import errors
from jdistgrad.collectives.roll_call import require_same_texts
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire.polling import poll

TOLD_SECONDS = 1.0
NEW = "new collectives"
FOR_ANY_WORLD = "Use jdistgrad.collectives.of_this_world(), which DataParallel() does by itself."


def raise_lost(error: Exception, ranks: Sequence[int], what: str, *, patient: bool = True) -> None:
    """Raise WorkerLostError if an MPI error comes from the loss of a worker among these ranks; else return.

    A world that does not survive raises the error that has broken it. ``patient``: wait for the lost worker's name.
    """
    worker = find_worker()
    if worker is None or not type(error).__module__.startswith("mpi4py"):
        return
    if not worker.survives:
        poll(lambda: not is_failure(error) or worker.failure is not None, TOLD_SECONDS)
        if isinstance(worker.failure, errors.WorkerLostError):
            raise worker.failure.with_traceback(None) from error
    elif patient:
        poll(lambda: lost_among(ranks), TOLD_SECONDS)  # another thread is about to find out
    elif is_failure(error) and not lost_among(ranks):
        text = f"{worker.info} ({what}): a rank has died, or left this operation because another has died"
        raise errors.WorkerLostError(text) from error
    raise_if_lost(ranks, what, error)


def raise_if_lost(ranks: Sequence[int], what: str, error: Exception | None = None) -> None:
    """Raise WorkerLostError, caused by ``error``, if a worker among these ranks is lost."""
    worker, lost = find_worker(), lost_among(ranks)
    if worker is not None and lost:
        text = f"{worker.info} ({what}): {worker.peers.lost[lost[0]]}. Collectives do not go on without it."
        raise errors.WorkerLostError(text, worker=worker.directory.workers[lost[0]]) from error


def lost_among(ranks: Sequence[int]) -> list[int]:
    """Return the lost workers among these ranks, in a world that survives."""
    worker = find_worker()
    return sorted(worker.peers.lost.keys() & set(ranks)) if worker is not None and worker.survives else []


def is_failure(error: Exception) -> bool:
    """Return whether an error is an MPI error that the death of a rank may cause."""
    if not type(error).__module__.startswith("mpi4py"):
        return False
    from jdistgrad.wire import mpi_failures

    return mpi_failures.is_failure(cast("Any", error))


def is_local(worker: Worker) -> bool:
    """Return whether a worker's world needs no MPI: threads of one process, or a single worker."""
    return worker.shares_process or worker.size == 1


# Communicators, made while ranks may die, and MPI requests on them.

_begun: dict[int, Any] = {}  # active requests: MPI uses their memory even when this rank no longer waits


def complete(request: Any, memory: Any, timeout: float, check: Callable[[], None]) -> bool:
    """Wait for an MPI request, whose memory is kept until the end; return False after ``timeout`` seconds."""
    _begun[id(request)] = request, memory
    done = poll(request.Test, timeout, check)
    if done:
        _begun.pop(id(request))
    return done


def duplicate(comm: Any, members: Members, timeout: float) -> Any:
    """Return a duplicate of a communicator for its ranks, ``members``. All of them must call it."""
    meet(NEW, members, timeout)
    entry = CollectiveEntry(NEW, ("a duplicate", members.name), 0, may_leave=True)
    with WatchedBlock(current_worker(), entry, members.ranks) as together:
        twin, request = comm.Idup()

        def check() -> None:
            together.check()
            raise_if_lost(members.ranks, NEW)  # Open MPI 5 may leave a duplicate after a failed one waiting

        if not complete(request, None, timeout, check):
            raise errors.CollectiveError(f"MPI: could not duplicate the communicator within {timeout:g} s")
        raise_if_lost(members.ranks, NEW)
        return twin


def meet(what: str, members: Members, timeout: float) -> None:
    """Return when all members are about to create a communicator, which MPI cannot abandon once a rank has begun.

    Raises:
      MissingRanksError: some ranks have not come in time.
      DisagreementError: ranks create another one.
      WorkerLostError: a rank is lost, or in shutdown.
    """
    raise_if_lost(members.ranks, NEW)
    try:
        require_same_texts(members.begin(what, what).wait(timeout))
    except errors.WorkerLostError as error:
        raise_if_lost(members.ranks, NEW, error)
        raise


def subset(ranks: Sequence[int], timeout: float) -> Any:
    """Return a communicator of some ranks of ``MPI.COMM_WORLD``. All of these ranks must call it."""
    from mpi4py import MPI as mpi  # noqa: N811

    worker = current_worker()
    whole: Any = mpi.COMM_WORLD
    meet(f"{NEW} of the workers {list(ranks)}", Members(worker, ranks, "a subset"), timeout)
    others = set(range(whole.size)) - set(ranks)
    if worker.survives and others and others <= worker.peers.lost.keys():
        whole = whole.Shrink()  # MPI creates no group from one with dead ranks
    places = mpi.Group.Translate_ranks(mpi.COMM_WORLD.group, list(ranks), whole.group)
    try:
        return whole.Create_group(whole.group.Incl(places))
    except mpi.Exception as error:
        raise_lost(error, sorted(others), "new collectives of some of the remaining workers")
        raise


def has_room(neighbours: Sequence[set[int]], size: int) -> bool:
    """Return whether overlap pays: on one machine a reduction needs a spare core per rank, between machines it waits.

    ``neighbours``: the cores of each rank on this machine; ``size``: the number of ranks on all machines.
    """
    return len(neighbours) < size or len(set().union(*neighbours)) >= 2 * len(neighbours)
