"""Termination detection, for closing a world: a state machine without I/O (Mattern's four counters, 1987).

A survey asks every worker how much work it has sent and received, whether it is busy, and whether it wants to close. A
world is quiet when all workers want to close, none is busy, as much was received as sent, and the previous survey saw
the same numbers: then nothing was on its way in between.

A lost worker is left out. Each worker reports whom it has lost, and counts only messages to and from the others: nobody
takes messages of a lost worker any more, so the counts of workers that have lost the same ones balance as above.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdistgrad.rpc.serving.being_served import Serving


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
