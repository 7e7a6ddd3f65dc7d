"""MPI communicators: how they are made while ranks may die, the requests under way on them, their ranks' cores."""

import collections
import contextlib
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jdistgrad.data_parallel.collectives.agreeing import Agreeing
from jdistgrad.data_parallel.collectives.by_calls import ByCalls
from jdistgrad.data_parallel.collectives.world import (
    CollectiveEntry,
    WatchedBlock,
    lost_among,
    raise_if_lost,
    raise_lost,
)
from jdistgrad.errors import CollectiveError, WorkerLostError
from jdistgrad.rpc.worker import Worker, find_worker
from jdistgrad.threads import usable_cores
from jdistgrad.wire.polling import poll

NEW = "new collectives"
LOOKED_AT = 16  # of the requests that nobody waits for, with each that is added
CORES = 1 << 10  # bytes of the set of a rank's cores: a bit for each

_begun: dict[int, Any] = {}  # the requests under way: MPI uses their memory even when this rank no longer waits
_ending: collections.deque[tuple[Any, ...]] = collections.deque()  # the requests that nobody waits for
_made_now: set[tuple[int, ...]] = set()  # the workers of whom this rank is making collectives
_lock = threading.Lock()


@contextlib.contextmanager
def one_at_a_time(ranks: tuple[int, ...]) -> Iterator[None]:
    """Open a block in which this rank makes collectives of these workers.

    Raises:
      CollectiveError: another thread does: the other ranks may pair the two in another way, and MPI mixes them up.
    """
    with _lock:
        if ranks in _made_now:
            raise CollectiveError(
                f"of_this_world: another thread is making collectives of the workers {list(ranks)} on this rank: which "
                "belong to which of the other workers' is not known. Make one after the other: wait for "
                "reference.creation().result() before the next jd.remote, for future.result() before the next "
                "jd.rpc_async."
            )
        _made_now.add(ranks)
    try:
        yield
    finally:
        with _lock:
            _made_now.discard(ranks)


def keep(request: Any, *memory: Any) -> None:
    """Keep the memory of a request until it has ended."""
    _begun[id(request)] = (request, *memory)


def let_go(request: Any) -> None:
    _begun.pop(id(request))


def keep_until_ended(request: Any, *memory: Any) -> None:
    """Keep the memory of a request that nobody waits for; let go of some that have ended."""
    with _lock:
        _ending.append((request, *memory))
        for _ in range(min(LOOKED_AT, len(_ending))):
            oldest = _ending.popleft()
            try:
                has_ended = oldest[0].Test()
            except Exception:  # to a rank that has died: MPI may still use the memory
                keep(*oldest)
            else:
                if not has_ended:
                    _ending.append(oldest)


@contextlib.contextmanager
def naming_lost(ranks: Sequence[int], what: str = NEW) -> Iterator[None]:
    """Let errors of MPI in the block that come from the loss of a worker among these ranks name it."""
    try:
        yield
    except Exception as error:
        raise_lost(error, ranks, what)
        raise


def duplicate(comm: Any, ranks: Sequence[int], timeout: float, group: Hashable = None) -> tuple[Any, bytes]:
    """Return a duplicate of a communicator, and a name for the duplicate that is the same on all ranks.

    Arguments:
      ranks: those of the communicator, as the world counts them.
      group: the communicator's name, if it has one.
    """
    meet(NEW, ranks, timeout, group)
    entry = CollectiveEntry(NEW, ("a duplicate", group, tuple(ranks)), 0, may_leave=True)
    with naming_lost(ranks), WatchedBlock(_worker_of_rank(), entry, ranks, blocking=False) as together:
        twin, request = comm.Idup()
        _finish(request, ranks, "the communicator could not be duplicated", timeout, together)
        name = bytearray(os.urandom(8))
        _finish(twin.Ibcast(name), ranks, "the ranks could not name the new communicator", timeout, together, name)
        return twin, bytes(name)


def meet(what: str, ranks: Sequence[int], timeout: float, group: Hashable = None) -> None:
    """Return when all ranks have come to make a communicator, which MPI can no longer give up once one has begun.

    Raises:
      MissingRanksError: some ranks have not come in time.
      DisagreementError: ranks make another one.
      WorkerLostError: a rank is lost, or in shutdown.
    """
    raise_if_lost(ranks, NEW)
    worker = _worker_of_rank()
    if worker is None or len(ranks) == 1:
        return
    try:
        Agreeing(ByCalls(worker, ranks, group, timeout), what)(timeout)
    except WorkerLostError as error:
        raise_if_lost(ranks, NEW, error)
        raise


def _worker_of_rank() -> Worker | None:
    """Return the worker that is a rank of MPI; None without a world, and in a local one, whose ranks are its own."""
    worker = find_worker()
    return None if worker is None or worker.hands_over else worker


def _finish(
    request: Any, ranks: Sequence[int], failed: str, timeout: float, together: WatchedBlock, *memory: Any
) -> None:
    """Wait for a request, until a rank is lost: MPI may leave a duplicate that comes after a failed one waiting."""
    keep(request, *memory)
    if not poll(lambda: bool(lost_among(ranks)) or request.Test(), timeout, together.check):
        raise CollectiveError(f"MPI: {failed} within {timeout:g} s")
    raise_if_lost(ranks, NEW)
    let_go(request)


def subset(ranks: Sequence[int], timeout: float) -> Any:
    """Return a communicator of some ranks of ``MPI.COMM_WORLD``. All of these ranks must call it."""
    from mpi4py import MPI as mpi  # noqa: N811

    meet(f"{NEW} of the workers {list(ranks)}", ranks, timeout)
    whole: Any = mpi.COMM_WORLD
    worker = find_worker()
    others = set(range(whole.size)) - set(ranks)
    if worker is not None and worker.survives and others and others <= worker.peers.lost.keys():
        whole = whole.Shrink()  # MPI makes no group from one that has dead ranks
    places = mpi.Group.Translate_ranks(mpi.COMM_WORLD.group, list(ranks), whole.group)
    with naming_lost(sorted(others), "new collectives of some of the workers that are left"):
        return whole.Create_group(whole.group.Incl(places))


def neighbours_cores(comm: Any) -> list[set[int]]:
    """Return the cores that each rank on this machine may use."""
    from mpi4py import MPI as mpi  # noqa: N811

    neighbours = comm.Split_type(mpi.COMM_TYPE_SHARED)
    everybody = bytearray(CORES * neighbours.size)
    mine = sum(1 << core for core in usable_cores() if core < 8 * CORES)
    neighbours.Allgather(mine.to_bytes(CORES, "little"), everybody)
    neighbours.Free()
    masks = [int.from_bytes(everybody[k : k + CORES], "little") for k in range(0, len(everybody), CORES)]
    return [{core for core in range(8 * CORES) if mask >> core & 1} for mask in masks]


def has_room(neighbours: Sequence[set[int]], size: int) -> bool:
    """Return whether overlap pays: on one machine a reduction needs a spare core per rank, between machines it waits.

    Arguments:
      neighbours: the cores of each rank on this machine.
      size: the number of ranks on all machines.
    """
    return len(neighbours) < size or len(set().union(*neighbours)) >= 2 * len(neighbours)
