"""When a world may close: a state machine without I/O (Mattern's four counters, 1987).

A survey asks every worker how much work it has sent and received, whether it is busy, and whether it wants to close. A
world is quiet when everybody wants to close, nobody is busy, as much was received as sent, and the survey before saw
the same numbers: then nothing was on its way in between.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jdistgrad.rpc.serving.being_served import Serving


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One worker's answer. ``sent`` and ``received`` count messages that carry work.

    ``serving`` is for people to read.
    """

    closing: bool
    busy: bool
    sent: int
    received: int
    serving: tuple[Serving, ...] = dataclasses.field(default=(), compare=False)

    def plain(self) -> tuple[Any, ...]:
        """It, made of nothing but numbers, strings and tuples."""
        return self.closing, self.busy, self.sent, self.received, tuple(map(tuple, self.serving))

    @classmethod
    def of(cls, plain: tuple[Any, ...]) -> "Report":
        closing, busy, sent, received, serving = plain
        return cls(closing, busy, sent, received, tuple(Serving(*one) for one in serving))


class Survey:
    """Collects the reports of round after round until the world is quiet."""

    def __init__(self, size: int):
        self._size = size
        self._reports: dict[int, Report] = {}
        self._before: Mapping[int, Report] | None = None

    def start(self) -> None:
        """Begin a round; reports of one that was given up do not count."""
        self._reports = {}

    def add(self, rank: int, report: Report) -> None:
        self._reports[rank] = report

    @property
    def complete(self) -> bool:
        return len(self._reports) == self._size

    def known(self) -> dict[int, Report]:
        """The latest report of each worker that has given one."""
        return {**(self._before or {}), **self._reports}

    def conclude(self) -> bool:
        """End the round; True when the world is quiet. Every worker must have reported."""
        assert self.complete
        reports = self._reports.values()
        still = all(report.closing and not report.busy for report in reports)
        balanced = sum(report.sent for report in reports) == sum(report.received for report in reports)
        quiet = still and balanced and self._before == self._reports
        self._before, self._reports = self._reports, {}
        return quiet
