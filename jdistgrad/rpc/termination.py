"""Termination detection, for closing a world: state machines without clock or I/O (Mattern's four counters, 1987).

A survey asks every worker how much work it has sent and received, whether it is busy, and whether it wants to close. A
world is quiet when all workers want to close, none is busy, as much was received as sent, and the previous survey saw
the same numbers: then nothing was on its way in between.

A lost worker is left out. Each worker reports whom it has lost, and counts only messages to and from the others: nobody
takes messages of a lost worker any more, so the counts of workers that have lost the same ones balance as above.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN = 3  # calls of one worker


class SurveyReport(NamedTuple):
    """A worker's answer to a survey.

    Attributes:
      sent, received: how many messages that carry work.
      serving: for people to read: functions, the ranks that have called them, and for how many seconds they run.
      lost: the workers that it has lost, in order; their messages are not counted.
    """

    closing: bool
    busy: bool
    sent: int
    received: int
    serving: tuple[tuple[str, int, float], ...] = ()
    lost: tuple[int, ...] = ()


class Survey:
    """The reports of one round after another, until the world is quiet.

    Attributes:
      awaited: the workers that are not lost.
      reports: those of this round, by worker. ``before``: those of the round before.
    """

    def __init__(self, size: int):
        self.awaited = set(range(size))
        self.reports: dict[int, SurveyReport] = {}
        self.before: dict[int, SurveyReport] = {}

    @property
    def complete(self) -> bool:
        return self.awaited <= self.reports.keys()

    def conclude(self) -> bool:
        """End the round; return True when the world is quiet. Every worker that is not lost must have reported."""
        assert self.complete
        now = {rank: report for rank, report in self.reports.items() if rank in self.awaited}
        reports = now.values()
        still = all(report.closing and not report.busy for report in reports)
        balanced = sum(report.sent for report in reports) == sum(report.received for report in reports)
        agreed = len({report.lost for report in reports}) == 1
        unchanged = _counts(now) == _counts(self.before)
        self.before, self.reports = now, {}
        return still and balanced and agreed and unchanged


def _counts(reports: Mapping[int, SurveyReport]) -> dict[int, SurveyReport]:
    return {rank: report._replace(serving=()) for rank, report in reports.items()}


def describe(workers: Sequence[Any], reports: Mapping[int, SurveyReport], lost: Collection[int] = ()) -> str:
    """Describe which workers that are not lost keep a world open, and by what, as far as their reports tell."""
    callers = {caller for report in reports.values() for _, caller, _ in report.serving}
    found = []
    for worker in workers:
        report = reports.get(worker.rank)
        if worker.rank in lost:
            continue
        if report is None:
            found.append(f"for {worker}, which does not answer")
            continue
        doing = [] if report.closing else ["has not called shutdown"]
        if report.serving:
            shown = report.serving[:SHOWN]
            calls = [f"{what}, called by {workers[caller]} {seconds:.0f} s ago" for what, caller, seconds in shown]
            more = len(report.serving) - SHOWN
            doing.append("serves " + ", and ".join(calls) + (f", and {more} more calls" if more > 0 else ""))
        elif report.closing and report.busy and worker.rank not in callers:
            doing.append("has calls in flight")
        if doing:
            found.append(f"for {worker}, which {' and '.join(doing)}")
    return "; ".join(found) or "for messages on their way"


class Patience:
    """The times at which a wait is logged: when nothing has moved for ``seconds``, then for twice as long, and so on.

    A worker that only serves is in ``shutdown`` for as long as the others need it. A program in which nothing moves for
    a while now and then logs this a few times, not for ever.
    """

    def __init__(self, seconds: float, now: float):
        self._seconds, self.next_look, self._enough, self._still_since = seconds, now + seconds, seconds, now
        self._before: Any = None

    def ends(self, reports: Mapping[int, SurveyReport], now: float) -> bool:
        """Return whether to log these reports now. If all workers want to close, movement does not postpone that."""
        self.next_look = now + self._seconds
        moved = {rank: (report.sent, report.received) for rank, report in reports.items()}
        if moved != self._before and not all(report.closing for report in reports.values()):
            self._still_since = now
        self._before = moved
        still = now - self._still_since
        if still < self._enough:
            return False
        self._enough = 2 * still
        return True
