"""MPI communicators: how they are made while ranks may die, the requests under way on them, their cores."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jdistgrad.collectives.roll_call import require_same_texts
from jdistgrad.collectives.world import lost_among, raise_if_lost, raise_lost
from jdistgrad.errors import CollectiveError, WorkerLostError
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

NEW = "new collectives"

_begun: dict[int, Any] = {}  # the requests under way: MPI uses their memory even when this rank no longer waits


def keep(request: Any, *memory: Any) -> None:
    _begun[id(request)] = (request, *memory)


def let_go(request: Any) -> None:
    _begun.pop(id(request))


@contextlib.contextmanager
def naming_lost(ranks: Sequence[int], what: str) -> Iterator[None]:
    """Let errors of MPI in the block that come from the loss of a worker among these ranks name it."""
    try:
        yield
    except Exception as error:
        raise_lost(error, ranks, what)
        raise


def duplicate(comm: Any, members: Members, timeout: float) -> tuple[Any, Members]:
    """Return a duplicate of a communicator, whose members these are, and the members. All of them must call it."""
    meet(NEW, members, timeout)
    entry = CollectiveEntry(NEW, ("a duplicate", members.name), 0, may_leave=True)
    with WatchedBlock(current_worker(), entry, members.ranks) as together:
        twin, request = comm.Idup()
        keep(request)
        # MPI may leave a duplicate that comes after a failed one waiting.
        if not poll(lambda: bool(lost_among(members.ranks)) or request.Test(), timeout, together.check):
            raise CollectiveError(f"MPI: could not duplicate the communicator within {timeout:g} s")
        raise_if_lost(members.ranks, NEW)
        let_go(request)
        return twin, members


def meet(what: str, members: Members, timeout: float) -> None:
    """Return when all members have come to make a communicator, which MPI can no longer give up once one has begun.

    Raises:
      MissingRanksError: some ranks have not come in time.
      DisagreementError: ranks make another one.
      WorkerLostError: a rank is lost, or in shutdown.
    """
    raise_if_lost(members.ranks, NEW)
    try:
        require_same_texts(members.begin(what, what).wait(timeout))
    except WorkerLostError as error:
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
        whole = whole.Shrink()  # MPI makes no group from one that has dead ranks
    places = mpi.Group.Translate_ranks(mpi.COMM_WORLD.group, list(ranks), whole.group)
    with naming_lost(sorted(others), "new collectives of some of the workers that are left"):
        return whole.Create_group(whole.group.Incl(places))


def has_room(neighbours: Sequence[set[int]], size: int) -> bool:
    """Return whether overlap pays: on one machine a reduction needs a spare core per rank, between machines it waits.

    Arguments:
      neighbours: the cores of each rank on this machine.
      size: the number of ranks on all machines.
    """
    return len(neighbours) < size or len(set().union(*neighbours)) >= 2 * len(neighbours)
