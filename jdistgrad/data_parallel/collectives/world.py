"""The current world, as the collectives use it: its watchdog, its lost workers, and values kept for the world."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from jdistgrad import errors
from jdistgrad.ffi.sites import is_cancelled
from jdistgrad.rpc.watchdog import CollectiveEntry as CollectiveEntry, Participation
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire.polling import poll

TOLD_SECONDS = 1.0
FOR_ANY_WORLD = "Use jdistgrad.collectives.of_this_world(), which DataParallel() does by itself."


class InterruptedCollectiveError(errors.CollectiveError):
    """A compiled program was interrupted in a collective."""


class WatchedBlock:
    """A block in which a worker takes part in a collective with others of its world, and its watchdog knows.

    Arguments:
      worker: None without a world, when there is no watchdog.
      ranks: the world ranks of all participants.
      blocking: whether the block is inside MPI, where only ``interrupt``, or else the end of the job, ends a wait.
      interrupt: ends the collective on all ranks, if they can go on without those that are lost.
      goes_on: whether the others do not wait for a lost worker.
    """

    def __init__(
        self,
        worker: Worker | None,
        entry: CollectiveEntry,
        ranks: Sequence[int],
        *,
        blocking: bool,
        interrupt: Callable[[], None] | None = None,
        goes_on: bool = False,
    ):
        self._worker, self._entry, self._ranks, self._blocking = worker, entry, ranks, blocking
        self._interrupt, self._goes_on, self.has_others = interrupt, goes_on, len(ranks) > 1
        self._participation: Participation | None = None

    def __enter__(self) -> "WatchedBlock":
        if self._worker is not None and self.has_others:
            self._participation = self._worker.watchdog.begin(
                self._entry, self._ranks, blocking=self._blocking, interrupt=self._interrupt, goes_on=self._goes_on
            )
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        if self._worker is not None and self._participation is not None:
            self._worker.watchdog.end(self._participation)
        if isinstance(error, Exception):
            raise_lost(error, self._ranks, self._entry.what, patient=self._interrupt is None)

    def check(self) -> None:
        if is_cancelled():
            raise InterruptedCollectiveError(f"{self._entry.what}: Ctrl-C has ended the program that waited in it.")
        if self._participation is not None:
            self._participation.check()

    @property
    def me(self) -> str:
        return str(self._worker.info) if self._worker is not None else "this rank"

    def unfinished(self) -> str:
        """Say which participants are still in the collective, and where in their programs."""
        if self._worker is None:
            return "Without jdistgrad.init() it is not known which ranks are still in it."
        others = [rank for rank in self._ranks if rank != self._worker.rank]
        found = self._worker.watchdog.ask(others, self._entry)
        names = self._worker.directory.workers
        inside = [f"{names[rank]} at {found[rank].place}" for rank in others if rank in found and found[rank].there]
        left = [f"{names[rank]} at {found[rank].place}" for rank in others if rank in found and not found[rank].there]
        silent = [str(names[rank]) for rank in others if rank not in found]
        groups = ("Still in it too", inside), ("Not in it", left), ("Without an answer", silent)
        return " ".join(f"{what}: {', '.join(those)}." for what, those in groups if those)

    def end_job(self, cause: str) -> None:
        """End the job: the other participants cannot be reached otherwise."""
        if self._worker is not None:
            self._worker.end_job(f"{self._worker.info}: {cause}")
        else:
            from jdistgrad.wire.mpi_process import abort_job

            abort_job(cause)

    def places(self, missing: Sequence[int]) -> dict[int, str]:
        """Return where the missing ranks (of the group) are in their programs, as far as they still answer."""
        if self._worker is None:
            return {}
        found = self._worker.watchdog.ask([self._ranks[one] for one in missing], self._entry)
        return {one: found[self._ranks[one]].place for one in missing if self._ranks[one] in found}


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
