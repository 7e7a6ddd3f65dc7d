"""What a schedule will take: when each action begins and ends, what is idle, and how many recordings are kept."""

import dataclasses
import functools
from collections.abc import Sequence

from jdistgrad.schedules.checking import Inputs, played
from jdistgrad.schedules.costs import Costs
from jdistgrad.schedules.picture import draw
from jdistgrad.schedules.playing import Span
from jdistgrad.schedules.schedule import Action, Kind, Schedule


def forecast(schedule: Schedule, costs: Costs | None = None, inputs: Inputs | None = None) -> "Forecast":
    """Compute how a schedule will run. Checks it as ``check`` does.

    Arguments:
      schedule: the schedule.
      costs: what actions cost; by default a forward pass 1, and a backward pass 2.
      inputs: as of ``check``.

    Example:
      >>> forecast(one_f_one_b(4, 8)).bubble  # (p - 1) / (m + p - 1)
      0.2727272727272727
    """
    return Forecast(schedule, tuple(map(tuple, played(schedule, inputs, costs or Costs()))))


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """How a schedule will run. Notebooks show it as a picture.

    ``spans`` are the start and the end of each worker's actions, in the order of ``schedule.actions``.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def times(self) -> dict[Action, Span]:
        """The start and the end of every action."""
        rows = zip(self.schedule.actions, self.spans, strict=True)
        return {action: span for row in rows for action, span in zip(*row, strict=True)}

    @property
    def seconds(self) -> float:
        """The time of the step: from the start of the first action to the end of the last."""
        return max(row[-1][1] for row in self.spans if row)

    @property
    def busy(self) -> tuple[float, ...]:
        """The time for which each worker carries out actions."""
        return tuple(sum(end - start for start, end in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The part of the step for which the workers are idle, as their mean."""
        whole = self.schedule.workers * self.seconds
        return 1 - sum(self.busy) / whole if whole else 0.0

    @property
    def recordings(self) -> tuple[int, ...]:
        """The most recordings that each worker keeps at a time.

        A recording is kept from the start of a forward pass to the end of its backward pass, or of the half that
        computes weight gradients. Without backward passes nothing is recorded.
        """
        return tuple(map(_peak, self.schedule.actions)) if self.schedule.trains else (0,) * self.schedule.workers

    def text(self) -> str:
        """Return a table with a row for each worker."""
        lines = [str(self), f"{'worker':>6}  {'busy':>10}  {'idle':>6}  {'recordings':>10}  stages"]
        for worker, (busy, recordings) in enumerate(zip(self.busy, self.recordings, strict=True)):
            stages = ", ".join(str(k) for k, place in enumerate(self.schedule.placement) if place == worker)
            idle = 1 - busy / self.seconds if self.seconds else 0.0
            lines.append(f"{worker:>6}  {busy:>10.4g}  {idle:>6.1%}  {recordings:>10}  {stages}")
        return "\n".join(lines)

    def svg(self) -> str:
        """Return a picture as SVG: a row for each worker, a colour for each microbatch."""
        return draw(str(self), self.schedule, self.spans, self.seconds)

    _repr_svg_ = svg

    def __str__(self) -> str:
        made = self.schedule
        return (
            f"{made.stages} stages on {made.workers} workers, {made.microbatches} microbatches: "
            f"step {self.seconds:.4g}, bubble {self.bubble:.1%}, recordings {max(self.recordings)}"
        )

    def __repr__(self) -> str:
        return f"<Forecast of {self}>"


def _peak(row: Sequence[Action]) -> int:
    alive = most = 0
    for kind, _, _ in row:
        if kind is Kind.FORWARD:
            alive += 1
            most = max(most, alive)
        elif kind is not Kind.INPUT:
            alive -= 1
    return most
