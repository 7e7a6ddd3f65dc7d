"""The workers that save or restore together: who they are, and what each of them says to the others.

A program in which all ranks do the same, and one in which worker 0 drives and the others serve, call ``save`` in the
same way: those that have called ``shutdown`` only serve, and all others are waited for. One worker, whose desk the
others come to, keeps the lists: the first that is not lost.
"""

import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from jdistgrad.data_parallel.collectives import world
from jdistgrad.errors import (
    CheckpointError,
    DisagreementError,
    DistgradError,
    MissingRanksError,
    WorkerLostError,
    WorldClosedError,
)
from jdistgrad.rpc import api
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
SECONDS = 300.0  # as long as a barrier waits
SLACK = 60.0  # for the desk's own error to arrive

Said = dict[int, Any]  # what each worker said, by rank
Attempts = frozenset[str]  # at a save or restore: each worker's has a name of its own

_making = threading.Lock()


class Meeting:
    """A meeting that workers come to. ``workers``: those that must come; None: all that do not merely serve."""

    def __init__(self, what: str, workers: Sequence[int] | None, of_all: Attempts):
        self.what, self.workers, self.key = what, workers, (what, of_all)
        self.said: Said = {}
        self.attempts = of_all  # and of those that have come
        self.came = threading.Event()
        self.failure: Exception | None = None
        self.end: concurrent.futures.Future[Said] = concurrent.futures.Future()

    @property
    def missing(self) -> list[int]:
        """The ranks of the workers that have not come; of those, some may merely serve, or be lost if named."""
        return [rank for rank in (_living() if self.workers is None else self.workers) if rank not in self.said]


class Desk:
    """The open meetings of a world; who has still to be told of one that failed; and the attempts that were ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, Attempts], Meeting] = {}
        self._owed: dict[int, list[tuple[Meeting, Exception]]] = {}
        self._ended: dict[str, str] = {}

    def arrive(
        self, what: str, rank: int, workers: Sequence[int] | None, said: Any, mine: str, of_all: Attempts = frozenset()
    ) -> tuple[Meeting, bool]:
        """Let a worker come to a meeting; return the meeting, and whether the worker is the first there.

        A worker that comes too late to a meeting that failed is told so, unless the others have come again: otherwise
        it might hold a meeting without them.

        Arguments:
          mine, of_all: the name of this worker's attempt; and the names of all, as soon as they are known.
        """
        with self._lock:
            first = (what, of_all) not in self._open
            if first and any(missed.what == what for missed, _ in self._owed.get(rank, ())):
                raise next(error for missed, error in self._owed.pop(rank) if missed.what == what)
            for one in self._ended.keys() & {mine, *of_all}:
                raise CheckpointError(self._ended[one])
            meeting = self._open.setdefault((what, of_all), Meeting(what, workers, of_all))
            meeting.said[rank] = said
            meeting.attempts |= {mine}
            meeting.came.set()
            return meeting, first

    def close(self, meeting: Meeting) -> None:
        """Close a meeting to which all have come. Raises its failure if it has failed meanwhile.

        Raises:
          DisagreementError: a worker has missed a meeting that failed, and those that were there do not come any more.
        """
        with self._lock:
            if meeting.failure is not None:
                raise meeting.failure
            owed = [(rank, missed) for rank in meeting.said for missed, _ in self._owed.pop(rank, ())]
            for rank, missed in owed:
                if not missed.said.keys() <= meeting.said.keys():
                    raise DisagreementError(
                        f"worker {rank}, which is in {meeting.what}, did not come to {missed.what}, where workers "
                        f"{sorted(missed.said)} were. They must make the same calls."
                    )
            del self._open[meeting.key]

    def fail(self, meeting: Meeting, error: Exception) -> None:
        """Let a meeting fail, unless it has."""
        with self._lock:
            if meeting.failure is None:
                self._fail([meeting], error)

    def compare(self, meeting: Meeting, missing: Collection[int]) -> None:
        """Let meetings fail if workers that are missing here wait elsewhere for some of these."""
        with self._lock:
            apart = [
                other
                for other in self._open.values()
                if other is not meeting
                and other.said.keys() & set(missing)
                and set(other.missing) & meeting.said.keys()
            ]
            if apart and meeting.failure is None:
                there = f"worker {min(apart[0].said.keys() & set(missing))} in {apart[0].what}"
                text = f"workers {sorted(meeting.said)} are in {meeting.what}, {there}. They must make the same calls."
                self._fail([meeting, *apart], DisagreementError(text))

    def leave(self, attempt: str, why: str) -> None:
        """Let the meetings of an attempt fail: its worker has left it."""
        with self._lock:
            self._ended[attempt] = why
            left = [one for one in self._open.values() if attempt in one.attempts]
            self._fail(left, CheckpointError(why))

    def _fail(self, meetings: Sequence[Meeting], error: Exception) -> None:
        here = {rank for one in meetings for rank in one.said}
        for one in meetings:
            one.failure = error
            del self._open[one.key]
            one.came.set()
            if not one.key[1]:  # else those that have not come find out by the names of the attempts
                for rank in set(one.missing) - here:
                    self._owed.setdefault(rank, []).append((one, error))
            one.said = dict.fromkeys(one.said)  # who was there; what they said may be large


def meet(
    what: str,
    said: Any,
    workers: Sequence[int] | None = None,
    seconds: float = SECONDS,
    mine: str = "",
    of_all: Attempts = frozenset(),
) -> Said:
    """Wait for the other workers; return what each of them says, by rank: a barrier with values.

    Arguments:
      what: the name of the meeting, the same on all of them.
      said: what this worker says.
      workers: the ranks of those that come; default all that have not called ``shutdown``, and are not lost.
      mine, of_all: as in ``Desk.arrive``.

    Raises:
      WorkerLostError: some worker is lost that has to come, or gives no sign of life.
      MissingRanksError: some worker neither came nor called ``shutdown``.
      DisagreementError: some worker is in another meeting instead.
      CheckpointError: some worker has left the attempt.
    """
    me = current_worker()
    if workers is not None and set(workers) == {me.rank}:
        return {me.rank: said}
    while True:
        at, others = _living()[0], _living() if workers is None else workers
        try:
            entry = world.CollectiveEntry(what, what, 0, by_calls=True)
            with world.WatchedBlock(me, entry, others, blocking=False):
                call = what, me.rank, workers, said, seconds, mine, of_all
                found: Said = me.rpc_async(at, _arrived, call, {}, seconds + SLACK).result()
                return found
        except WorkerLostError as error:
            if me.survives and error.worker == me.directory.workers[at]:
                poll(
                    functools.partial(me.peers.lost.__contains__, at), world.TOLD_SECONDS
                )  # another thread is about to find out
            if not (me.survives and at in me.peers.lost):
                raise


def leave(attempt: str, why: str) -> None:
    """Tell the desk that this worker has left an attempt, so that nobody waits for it. Does not wait for the desk."""
    with contextlib.suppress(DistgradError):  # the world is closed, or broken
        current_worker().rpc_async(_living()[0], _left, (attempt, why), {}, SECONDS)


def _living() -> list[int]:
    """Return the ranks of the workers that are not lost."""
    worker = current_worker()
    return [rank for rank in range(worker.size) if rank not in worker.peers.lost]


@shown_as("a meeting of workers")
def _arrived(
    what: str, rank: int, workers: Sequence[int] | None, said: Any, seconds: float, mine: str, of_all: Attempts
) -> Any:
    meeting, first = _desk().arrive(what, rank, workers, said, mine, of_all)
    if first:
        hold(_desk(), meeting, seconds)
    return meeting.end


def _left(attempt: str, why: str) -> None:
    _desk().leave(attempt, why)


def _desk() -> Desk:
    with _making:
        desk: Desk = current_worker().kept.setdefault("checkpoints' desk", Desk())
    return desk


def hold(desk: Desk, meeting: Meeting, seconds: float) -> None:
    """Hold a meeting. It is closed before those in it go on, since they may come to the next one of the same name."""
    try:
        result = _gathered(desk, meeting, seconds)
        desk.close(meeting)
    except Exception as error:
        desk.fail(meeting, error)
        meeting.end.set_exception(error)
    else:
        meeting.end.set_result(result)


def _gathered(desk: Desk, meeting: Meeting, seconds: float) -> Said:
    """Wait until everybody has come who has to, or the meeting has failed; return what they said."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while meeting.failure is None and (missing := _awaited(meeting, seconds)):
        desk.compare(meeting, missing)
        if time.monotonic() > end:
            raise MissingRanksError(
                f"{meeting.what}: {_names(missing)} did not come within {seconds:g} s. Every worker that has not "
                "called shutdown() calls it too, with the same step; for some workers only, name them on each of "
                "them: workers=[...].",
                missing=missing,
            )
        meeting.came.wait(pause)
        meeting.came.clear()
        pause = min(2 * pause, LONGEST_PAUSE)
    return dict(sorted(meeting.said.items()))


def _awaited(meeting: Meeting, seconds: float) -> list[int]:
    """Ask those that are missing whether they merely serve; return those that do not.

    They are asked also where it is known who has to come: only the loss of a worker that is asked is noticed.
    """
    me = current_worker()
    if me.failure is not None:
        raise me.failure
    if me.closed:  # a world that is no more would be waited in for ever
        raise WorldClosedError(f"{meeting.what}: the world was shut down meanwhile", worker=me.info)
    try:
        asked = [(rank, api.rpc_async(rank, only_serves, timeout=seconds)) for rank in meeting.missing]
        serving = {rank for rank, answer in asked if answer.result()}
    except WorkerLostError as error:
        if meeting.workers is None and me.survives:
            return meeting.missing  # without the lost one
        why = me.peers.lost.get(error.worker.rank, str(error))
        raise WorkerLostError(f"{meeting.what}: {why}", worker=error.worker) from error
    missing = meeting.missing
    if meeting.workers is None:
        return [rank for rank in missing if rank not in serving]
    gone = [rank for rank in missing if rank in serving]
    # Somebody may have come from a call that is served in ``shutdown``: others may be called, too.
    if gone and not any(api.rpc_sync(rank, only_serves, timeout=seconds) for rank in list(meeting.said)):
        text = f"{meeting.what}: {_names(gone)} will not come: shutdown() was called there"
        raise MissingRanksError(text, missing=gone)
    return missing


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in ranks)


def only_serves() -> bool:
    """Return whether this worker has called ``shutdown``, and goes on serving until all have."""
    return current_worker().closing.wanted
