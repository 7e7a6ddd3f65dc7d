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
from collections.abc import Sequence
from typing import Any

from jdistgrad.collectives.world import TOLD_SECONDS
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
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
SECONDS = 300.0  # as long as a barrier waits
SLACK = 60.0  # for the desk's own error to arrive

Said = dict[int, Any]  # what each worker said, by rank


class Party:
    """Those that save or restore together. They come once to find each other, and again after each stage.

    Attributes:
      workers: those that must come. None, until all have come once: all that do not merely serve.
      said: what those say that have come this time.
      end: what all say, when all have come this time.
    """

    def __init__(self, what: str, workers: Sequence[int] | None):
        self.what, self.workers = what, workers
        self.said: Said = {}
        self.came = threading.Event()
        self.failure: Exception | None = None
        self.end: concurrent.futures.Future[Said] = concurrent.futures.Future()

    @property
    def missing(self) -> list[int]:
        """The ranks of the workers that have not come; of those, some may merely serve, or be lost if named."""
        return [rank for rank in (_living() if self.workers is None else self.workers) if rank not in self.said]


class Desk:
    """The meetings of a world, and who has still to be told of one that failed.

    A worker's call has a name of its own, its attempt, by which it is found in the meeting that it has come to.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._new: dict[str, Party] = {}  # to which not all have come once, by what they are for
        self._of: dict[str, Party] = {}  # by attempt
        self._owed: dict[int, tuple[set[int], Exception]] = {}  # by rank: who was there, and what they were told

    def arrive(
        self, what: str, rank: int, attempt: str, workers: Sequence[int] | None, said: Any
    ) -> tuple[Party, concurrent.futures.Future[Said], bool]:
        """Let a worker come to a meeting; return the meeting, its end, and whether the worker is the first there.

        A worker that has missed a meeting that failed is told so, unless the others have come again: otherwise it might
        hold a meeting without them.

        Raises:
          DisagreementError: workers that are missing here wait elsewhere for some of these, who are told too.
        """
        with self._lock:
            meeting = self._of.get(attempt) or self._new.get(what)
            if meeting is None:
                meeting = Party(what, workers)
                were_there, why = self._owed.get(rank, (set(), None))
                if why is not None and were_there & set(meeting.missing):
                    del self._owed[rank]
                    raise why
                self._new[what] = meeting
            if meeting.failure is None:
                first = not meeting.said
                self._of[attempt] = meeting
                self._owed.pop(rank, None)
                meeting.said[rank] = said
                meeting.came.set()
                self._compare(meeting)
            if meeting.failure is not None:
                raise meeting.failure
            return meeting, meeting.end, first

    def _compare(self, meeting: Party) -> None:
        missing = set(meeting.missing)
        apart = [
            other
            for other in {*self._new.values(), *self._of.values()} - {meeting}
            if other.failure is None and other.said.keys() & missing and set(other.missing) & meeting.said.keys()
        ]
        if apart:
            there = f"worker {min(apart[0].said.keys() & missing)} in {apart[0].what}"
            text = f"workers {sorted(meeting.said)} are in {meeting.what}, {there}. They must make the same calls."
            self.fail([meeting, *apart], DisagreementError(text))

    def close(self, meeting: Party) -> Said:
        """Return what all have said, who come to the next stage from now on. Raises the meeting's failure."""
        with self._lock:
            if meeting.failure is not None:
                raise meeting.failure
            if self._new.get(meeting.what) is meeting:
                del self._new[meeting.what]
            said = dict(sorted(meeting.said.items()))
            meeting.workers, meeting.said, meeting.end = list(said), {}, concurrent.futures.Future()
            return said

    def leave(self, attempt: str, why: str | None) -> None:
        """Forget an attempt that has ended; or, if it has been left before, let its meeting fail."""
        with self._lock:
            if why is None:
                self._of.pop(attempt, None)
            else:  # where this comes before the worker itself, the attempt has a meeting of its own, which has failed
                self.fail([self._of.setdefault(attempt, Party("", ()))], CheckpointError(why))

    def fail(self, meetings: Sequence[Party], error: Exception) -> None:
        """Let meetings fail, unless they have; of those that have not come, note that they are to be told."""
        with self._lock:
            here = {rank for one in meetings for rank in one.said}
            for one in meetings:
                if one.failure is None:
                    one.failure = error
                    one.came.set()
                    if self._new.get(one.what) is one:  # else those that have not come are found by their attempts
                        del self._new[one.what]
                        self._owed |= dict.fromkeys(set(one.missing) - here, (here, error))
                    one.said = dict.fromkeys(one.said)  # who was there; what they said may be large


def meet(what: str, attempt: str, said: Any, workers: Sequence[int] | None, seconds: float) -> Said:
    """Wait for the other workers; return what each of them says, by rank: a barrier with values.

    Arguments:
      what: the name of the meeting, the same on all of them.
      attempt: a name for this call of this worker's, the same at all stages.
      said: what this worker says.
      workers: the ranks of those that come; None: all that have not called ``shutdown``, and are not lost.
      seconds: how long to wait for them; without end for those that have come together once.

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
            entry = CollectiveEntry(what, what, 0, by_calls=True)
            with WatchedBlock(me, entry, others):
                call = what, me.rank, attempt, workers, said, seconds
                found: Said = me.rpc_async(at, _arrived, call, {}, seconds + SLACK).result()
                return found
        except WorkerLostError as error:
            is_of_the_desk = me.survives and error.worker == me.directory.workers[at]
            if is_of_the_desk:
                is_lost = functools.partial(me.peers.lost.__contains__, at)
                poll(is_lost, TOLD_SECONDS)  # another thread is about to find out
            if not (is_of_the_desk and at in me.peers.lost):
                raise


def leave(attempt: str, why: str | None) -> None:
    """Tell the desk that an attempt has ended; ``why``: before its end, so that nobody waits for this worker.

    Does not wait for the desk.
    """
    with contextlib.suppress(DistgradError):  # the world is closed, or broken
        current_worker().rpc_async(_living()[0], _left, (attempt, why), {}, SECONDS)


def _living() -> list[int]:
    """Return the ranks of the workers that are not lost."""
    worker = current_worker()
    return [rank for rank in range(worker.size) if rank not in worker.peers.lost]


@shown_as("a meeting of workers")
def _arrived(
    what: str, rank: int, attempt: str, workers: Sequence[int] | None, said: Any, seconds: float
) -> concurrent.futures.Future[Said]:
    meeting, end, first = _desk().arrive(what, rank, attempt, workers, said)
    if first:
        hold(_desk(), meeting, seconds)
    return end


def _left(attempt: str, why: str | None) -> None:
    _desk().leave(attempt, why)


def _desk() -> Desk:
    desk: Desk = current_worker().kept.setdefault("checkpoints' desk", Desk())
    return desk


def hold(desk: Desk, meeting: Party, seconds: float) -> None:
    """Wait until everybody has come who has to, or the meeting has failed, and let those that are there go on.

    It is closed before they do, since they may come to the next one of the same name.
    """
    until, pause, end = time.monotonic() + seconds, FIRST_PAUSE, meeting.end
    try:
        while meeting.failure is None and (missing := _awaited(meeting, seconds)):
            if time.monotonic() > until:
                raise MissingRanksError(
                    f"{meeting.what}: {_names(missing)} did not come within {seconds:g} s. Every worker that has not "
                    "called shutdown() calls it too, with the same step; for some workers only, name them on each of "
                    "them: workers=[...].",
                    missing=missing,
                )
            meeting.came.wait(pause)
            meeting.came.clear()
            pause = min(2 * pause, LONGEST_PAUSE)
        end.set_result(desk.close(meeting))
    except Exception as error:
        desk.fail([meeting], error)
        end.set_exception(error)


def _awaited(meeting: Party, seconds: float) -> list[int]:
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
