"""The messages about what a shutdown waits for, and when to log them: without clock or I/O."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jdistgrad.rpc.members.termination import Report
from jdistgrad.rpc.serving.being_served import Serving

SHOWN = 3  # calls of one worker


def describe(workers: Sequence[Any], reports: Mapping[int, Report], lost: Collection[int] = ()) -> str:
    """Describe which workers that are not lost keep a world open, and by what, as far as their reports tell."""
    whole = [(worker, _which(worker.rank, workers, reports)) for worker in workers if worker.rank not in lost]
    return "; ".join(f"for {worker}, which {which}" for worker, which in whole if which) or "for messages on their way"


def _which(rank: int, workers: Sequence[Any], reports: Mapping[int, Report]) -> str:
    report = reports.get(rank)
    if report is None:
        return "does not answer"
    doing = [] if report.closing else ["has not called shutdown"]
    if report.serving:
        doing.append(_serves(report.serving, workers))
    elif report.closing and report.busy and not any(rank in _callers(other) for other in reports.values()):
        doing.append("has calls in flight")
    return " and ".join(doing)


def _callers(report: Report) -> set[int]:
    return {call.caller for call in report.serving}


def _serves(calls: Sequence[Serving], workers: Sequence[Any]) -> str:
    told = [f"{call.function}, called by {workers[call.caller]} {call.seconds:.0f} s ago" for call in calls[:SHOWN]]
    more = len(calls) - SHOWN
    return "serves " + ", and ".join(told) + (f", and {more} more calls" if more > 0 else "")


class Patience:
    """The times at which a wait is logged: when nothing has moved for ``seconds``, then for twice as long, and so on.

    A worker that only serves is in ``shutdown`` for as long as the others need it. A program in which nothing moves for
    a while now and then logs this a few times, not for ever.
    """

    def __init__(self, seconds: float, now: float):
        self._seconds, self._started = seconds, now
        self._next_look, self._enough, self._still_since = now + seconds, seconds, now
        self._before: Any = None

    def waited(self, now: float) -> float:
        return now - self._started

    def wants_to_look(self, now: float) -> bool:
        """Return whether it is time to ask for reports again."""
        if now < self._next_look:
            return False
        self._next_look = now + self._seconds
        return True

    def ends(self, reports: Mapping[int, Report], now: float) -> bool:
        """Return whether to log these reports now. If all workers want to close, movement does not postpone that."""
        moved = {rank: (report.sent, report.received) for rank, report in reports.items()}
        if moved != self._before and not all(report.closing for report in reports.values()):
            self._still_since = now
        self._before = moved
        still = now - self._still_since
        if still < self._enough:
            return False
        self._enough = 2 * still
        return True
