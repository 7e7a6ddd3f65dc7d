"""The workers that save or restore together: who they are, and what each of them says to the others.

A program in which all ranks do the same, and one in which worker 0 drives and the others serve, call ``save`` in the
same way: those that have called ``shutdown`` only serve, and all others are waited for. One worker, whose desk the
others come to, keeps the lists: the first that is not lost.
"""

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from jdistgrad.data_parallel.collectives import world
from jdistgrad.errors import DisagreementError, MissingRanksError, WorkerLostError, WorldClosedError
from jdistgrad.rpc import api
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
SECONDS = 300.0  # as long as a barrier waits
SLACK = 60.0  # for the desk's own error to arrive

Said = dict[int, Any]  # what each worker said, by rank

_making = threading.Lock()


class Meeting:
    """A meeting that workers come to. ``workers``: those that must come; None: all that do not merely serve."""

    def __init__(self, what: str, workers: Sequence[int] | None):
        self.what, self.workers = what, workers
        self.said: Said = {}
        self.came = threading.Event()
        self.disagreement: str | None = None
        self.told: set[int] = set()  # of the disagreement: who waits here, and in the meetings that share this set
        self.end: concurrent.futures.Future[Said] = concurrent.futures.Future()

    @property
    def missing(self) -> list[int]:
        """The ranks of the workers that have not come; of those, some may merely serve, or be lost if named."""
        workers = _living() if self.workers is None else self.workers
        return [rank for rank in workers if rank not in self.said]


class Desk:
    """The open meetings of a world, and the meetings that failed before all had come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Meeting] = {}
        self._failed: dict[str, tuple[Meeting, set[int]]] = {}

    def arrive(self, what: str, rank: int, workers: Sequence[int] | None, said: Any) -> tuple[Meeting, bool]:
        """Let a worker come to a meeting; return the meeting, and whether the worker is the first there.

        One that comes too late to a meeting that failed is told so, unless the others have come together again: a new
        meeting might be held without them.
        """
        with self._lock:
            failed, late = self._failed.get(what, (None, set()))
            was_late = rank in late
            late.discard(rank)
            if failed is not None and not late:
                del self._failed[what]
            meeting = self._open.get(what)
            first = meeting is None or rank in meeting.told  # that one has failed, which this worker was told elsewhere
            if failed is not None and was_late and first:
                return failed, False
            if meeting is None or first:
                meeting = self._open[what] = Meeting(what, workers)
            meeting.said[rank] = said
            if meeting.disagreement is not None:
                meeting.told.add(rank)
            meeting.came.set()
            return meeting, first

    def close(self, meeting: Meeting) -> None:
        """Close a meeting to which all have come.

        Raises:
          DisagreementError: a worker elsewhere has been told that it disagrees with this meeting, or a worker here
            has missed a meeting that failed, and those that were there do not come any more.
        """
        with self._lock:
            meeting.disagreement = meeting.disagreement or self._missed_by(meeting)
            if meeting.disagreement is not None:
                raise DisagreementError(meeting.disagreement)
            self._open.pop(meeting.what, None)
            self._failed.pop(meeting.what, None)

    def _missed_by(self, meeting: Meeting) -> str | None:
        """Say which failed meeting workers of this one have missed, unless all that were there are here; only once."""
        here, found = set(meeting.said), None
        for failed, late in self._failed.values():
            if late & here and not set(failed.said) <= here:
                both = f"worker {min(late & here)}, which is in {meeting.what}, did not come to {failed.what}"
                found = f"{both}, where workers {sorted(failed.said)} were. They must make the same calls."
            late -= here
        return found

    def close_failed(self, meeting: Meeting) -> None:
        """Close a meeting that has failed, and remember who has not been told."""
        with self._lock:
            if self._open.get(meeting.what) is meeting:
                del self._open[meeting.what]
            late = set(meeting.missing) - meeting.told
            meeting.said = dict.fromkeys(meeting.said)  # who was there; what they said may be large
            if late:
                self._failed[meeting.what] = meeting, late

    def compare(self, meeting: Meeting, missing: Sequence[int]) -> None:
        """Note a disagreement, in both meetings, if a worker that is missing here waits elsewhere for one of these.

        Workers that are told of it may meet again before both meetings have ended.
        """
        with self._lock:
            if meeting.disagreement is not None:
                return
            for other in self._open.values():
                waiting = set(other.said) & set(missing)
                waits_for = set(_living()) if other.workers is None else set(other.workers)
                wanted = set(meeting.said) & waits_for - set(other.said) - other.told
                if other is not meeting and waiting and wanted:
                    text = (
                        f"workers {sorted(meeting.said)} are in {meeting.what}, worker {min(waiting)} in {other.what}"
                    )
                    meeting.disagreement = other.disagreement = f"{text}. They must make the same calls."
                    self._tell_together(meeting, other)

    def _tell_together(self, meeting: Meeting, other: Meeting) -> None:
        before = other.told
        meeting.told |= before | set(meeting.said) | set(other.said)
        for one in self._open.values():
            if one.told is before:
                one.told = meeting.told


class Arrival:
    """A worker's arrival at a meeting. If a signal ends its wait there, another thread may go on with the wait.

    A meeting is a barrier with values, among workers that need not be known beforehand.

    Arguments:
      what: the name of the meeting, the same on all of them.
      said: what this worker says.
      workers: the ranks of those that come; default all that have not called ``shutdown``, and are not lost.
    """

    def __init__(self, what: str, said: Any, workers: Sequence[int] | None = None, seconds: float = SECONDS):
        self._what, self._said, self._workers, self._seconds = what, said, workers, seconds
        self._asked: CallFuture[Said] | None = None
        self._desk = -1

    def wait(self, *, shown: bool = True) -> Said:
        """Wait for the other workers; return what each of them says, by rank.

        Arguments:
          shown: whether this worker's program waits in the meeting, and the others may be told so.

        Raises:
          WorkerLostError: some worker is lost that has to come, or gives no sign of life.
          MissingRanksError: some worker neither came nor called ``shutdown``.
          DisagreementError: some worker is in another meeting instead.
        """
        me = current_worker().rank
        if self._workers is not None and set(self._workers) == {me}:
            return {me: self._said}
        while True:
            others = _living() if self._workers is None else self._workers
            shows = current_worker().watchdog.shows(self._what, others)
            try:
                with shows if shown else contextlib.nullcontext():
                    return self._call().result()
            except WorkerLostError as error:
                if not _does_without(self._desk, error):
                    raise
                self._asked = None

    def _call(self) -> CallFuture[Said]:
        with put_off_interrupt():  # or the desk might be called twice
            if self._asked is None:
                self._desk = _living()[0]
                call = self._what, current_worker().rank, self._workers, self._said, self._seconds
                self._asked = current_worker().rpc_async(self._desk, _arrived, call, {}, self._seconds + SLACK)
            return self._asked


def _does_without(at: int, error: WorkerLostError) -> bool:
    """Return whether a world goes on without the worker of a desk, which is lost if the error tells of it."""
    worker = current_worker()
    if worker.survives and error.worker == worker.directory.workers[at]:
        poll(lambda: at in worker.peers.lost, world.TOLD_SECONDS)  # another thread is about to find out
    return worker.survives and at in worker.peers.lost


def _living() -> list[int]:
    """Return the ranks of the workers that are not lost."""
    worker = current_worker()
    return [rank for rank in range(worker.size) if rank not in worker.peers.lost]


@shown_as("a meeting of workers")
def _arrived(what: str, rank: int, workers: Sequence[int] | None, said: Any, seconds: float) -> Any:
    meeting, first = _desk().arrive(what, rank, workers, said)
    if first:
        hold(_desk(), meeting, seconds)
    return meeting.end


def hold(desk: Desk, meeting: Meeting, seconds: float) -> None:
    """Hold a meeting. It is closed before those in it go on, since they may come to the next one of the same name."""
    try:
        result = _gathered(meeting, seconds)
        desk.close(meeting)
    except Exception as error:
        desk.close_failed(meeting)
        meeting.end.set_exception(error)
    else:
        meeting.end.set_result(result)


def _desk() -> Desk:
    with _making:
        desk = world.kept("checkpoints' desk")
        if desk is None:
            desk = Desk()
            world.keep("checkpoints' desk", desk)
    return desk


def _gathered(meeting: Meeting, seconds: float) -> Said:
    """Wait until everybody has come who has to; return what they said."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while missing := _awaited(meeting, seconds):
        _desk().compare(meeting, missing)
        if meeting.disagreement is not None:
            raise DisagreementError(meeting.disagreement)
        if time.monotonic() > end:
            raise _too_late(meeting, missing, seconds)
        meeting.came.wait(pause)
        meeting.came.clear()
        pause = min(2 * pause, LONGEST_PAUSE)
    return dict(sorted(meeting.said.items()))


def _awaited(meeting: Meeting, seconds: float) -> list[int]:
    """Ask those that are missing whether they merely serve; return those that do not.

    They are asked also where it is known who has to come: only the loss of a worker that is asked is noticed.
    """
    _check_world(meeting)
    try:
        asked = [(rank, api.rpc_async(rank, only_serves, timeout=seconds)) for rank in meeting.missing]
        serving = {rank for rank, answer in asked if answer.result()}
    except WorkerLostError as error:
        if meeting.workers is None and current_worker().survives:
            return meeting.missing  # without the lost one
        why = current_worker().peers.lost.get(error.worker.rank, str(error))
        raise WorkerLostError(f"{meeting.what}: {why}", worker=error.worker) from error
    missing = meeting.missing
    gone = [rank for rank in missing if rank in serving]
    if meeting.workers is None:
        return [rank for rank in missing if rank not in serving]
    if gone and not _were_called(meeting, seconds):
        text = f"{meeting.what}: {_names(gone)} will not come: shutdown() was called there"
        raise MissingRanksError(text, missing=gone)
    return missing


def _were_called(meeting: Meeting, seconds: float) -> bool:
    """Return whether somebody came from a call, served in ``shutdown``: others may be called, too."""
    return any(api.rpc_sync(rank, only_serves, timeout=seconds) for rank in list(meeting.said))


def _check_world(meeting: Meeting) -> None:
    """Raise if the desk's worker has no world any more, which would be waited in for ever."""
    me = current_worker()
    if me.failure is not None:
        raise me.failure
    if me.closed:
        raise WorldClosedError(f"{meeting.what}: the world was shut down meanwhile", worker=me.info)


def _too_late(meeting: Meeting, missing: list[int], seconds: float) -> MissingRanksError:
    return MissingRanksError(
        f"{meeting.what}: {_names(missing)} did not come within {seconds:g} s. Every worker that has not called "
        "shutdown() calls it too, with the same step; for some workers only, name them on each of them: workers=[...].",
        missing=missing,
    )


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in ranks)


def only_serves() -> bool:
    """Return whether this worker has called ``shutdown``, and goes on serving until all have."""
    return current_worker().closing.wanted
