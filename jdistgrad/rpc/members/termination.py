"""Termination detection, for closing a world: state machines without clock or I/O (Mattern's four counters, 1987).

A survey asks every worker how much work it has sent and received, whether it is busy, and whether it wants to close. A
world is quiet when all workers want to close, none is busy, as much was received as sent, and the previous survey saw
the same numbers: then nothing was on its way in between.

A lost worker is left out. Each worker reports whom it has lost, and counts only messages to and from the others: nobody
takes messages of a lost worker any more, so the counts of workers that have lost the same ones balance as above.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jdistgrad.rpc.serving.server import Serving

SHOWN = 3  # calls of one worker


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A worker's answer to a survey. ``sent`` and ``received`` count messages that carry work.

    ``lost``: the workers that it has lost, in order; their messages are not counted. ``serving`` is for people to read.
    """

    closing: bool
    busy: bool
    sent: int
    received: int
    serving: tuple[Serving, ...] = dataclasses.field(default=(), compare=False)
    lost: tuple[int, ...] = ()

    def plain(self) -> tuple[Any, ...]:
        """Return the report as numbers, strings and tuples only."""
        return self.closing, self.busy, self.sent, self.received, tuple(map(tuple, self.serving)), self.lost

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> "Report":
        closing, busy, sent, received, serving, lost = plain
        return cls(closing, busy, sent, received, tuple(Serving(*one) for one in serving), tuple(lost))


class Survey:
    """The reports of one round after another, until the world is quiet."""

    def __init__(self, size: int):
        self._awaited = set(range(size))
        self._reports: dict[int, Report] = {}
        self._before: Mapping[int, Report] | None = None

    def start(self) -> None:
        """Begin a round. The reports of an abandoned round do not count."""
        self._reports = {}

    def add(self, rank: int, report: Report) -> None:
        self._reports[rank] = report

    @property
    def complete(self) -> bool:
        return self._awaited <= self._reports.keys()

    def leave_out(self, rank: int) -> None:
        """Wait no longer for the report of a lost worker."""
        self._awaited.discard(rank)

    def known(self) -> dict[int, Report]:
        """Return the latest report of each worker that has given one."""
        return {**(self._before or {}), **self._reports}

    def conclude(self) -> bool:
        """End the round; return True when the world is quiet. Every worker that is not lost must have reported."""
        assert self.complete
        self._reports = {rank: report for rank, report in self._reports.items() if rank in self._awaited}
        reports = self._reports.values()
        still = all(report.closing and not report.busy for report in reports)
        balanced = sum(report.sent for report in reports) == sum(report.received for report in reports)
        agreed = len({report.lost for report in reports}) == 1
        quiet = still and balanced and agreed and self._before == self._reports
        self._before, self._reports = self._reports, {}
        return quiet


def describe(workers: Sequence[Any], reports: Mapping[int, Report], lost: Collection[int] = ()) -> str:
    """Describe which workers that are not lost keep a world open, and by what, as far as their reports tell."""
    callers = {call.caller for report in reports.values() for call in report.serving}
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
            calls = [f"{one.function}, called by {workers[one.caller]} {one.seconds:.0f} s ago" for one in shown]
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
        self.started = now
        self._seconds, self._next_look, self._enough, self._still_since = seconds, now + seconds, seconds, now
        self._before: Any = None

    def wants_to_look(self, now: float) -> bool:
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
