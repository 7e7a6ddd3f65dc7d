"""The measured times of a step, next to the forecast of its schedule."""

import functools
import statistics
from collections.abc import Mapping, Sequence

from jdistgrad.pipeline.shares import Done
from jdistgrad.schedules.forecasting import Forecast, draw, forecast
from jdistgrad.schedules.schedule import KINDS, Costs, Kind, Schedule


class Report:
    """What each worker did in a step, and when. Notebooks show it as a picture, like its ``forecast``.

    Attributes:
      seconds: of the step, on the worker that drives it.
      waited, computed: for each worker, the seconds in which it waited for others, and in which it computed and sent.
      recordings: for each worker, the most recordings alive at once.
    """

    def __init__(self, schedule: Schedule, inputs: Mapping[int, Sequence[int]], done: Sequence[Done], seconds: float):
        self.schedule, self.seconds, self._inputs = schedule, seconds, inputs
        self.times = [one.times for one in done]
        self.recordings = [one.recordings for one in done]
        self.waited = [sum(begin - due for due, begin, _, _ in times) for times in self.times]
        self.computed = [sum(end - begin for _, begin, _, end in times) for times in self.times]

    @property
    def costs(self) -> Costs:
        """The median duration of each kind of action on each stage, for forecasts, also of other schedules.

        The first actions of a first step include compilation. Both halves of a backward pass are measured.

        Raises:
          ValueError: the step had no backward passes, so their cost is not known.
        """
        if not self.schedule.trains:
            raise ValueError("this step had forward passes only: take the costs from the report of a training step")
        return self._costs

    @functools.cached_property
    def _costs(self) -> Costs:
        stages = range(self.schedule.stages)
        found: dict[tuple[Kind, int], list[float]] = {(kind, stage): [] for kind in Kind for stage in stages}
        for row, times in zip(self.schedule.actions, self.times, strict=True):
            for action, (_, begin, half, end) in zip(row, times, strict=True):
                found[action.kind, action.stage].append(end - begin)
                parts = KINDS[action.kind].parts
                if len(parts) > 1:
                    for part, seconds in zip(parts, (half - begin, end - half), strict=True):
                        found[part, action.stage].append(seconds)
        usual = {key: statistics.median(seconds) if seconds else 0.0 for key, seconds in found.items()}
        each = {
            kind: [usual[kind, k] if found[kind, k] else sum(usual[part, k] for part in spec.parts) for k in stages]
            for kind, spec in KINDS.items()
        }
        return Costs(each[Kind.FORWARD], each[Kind.BACKWARD], each[Kind.INPUT], each[Kind.WEIGHT])

    @functools.cached_property
    def forecast(self) -> Forecast:
        """The forecast with the median cost of each kind of action, and without costs of messages."""
        return forecast(self.schedule, self._costs, self._inputs)

    @property
    def bubble(self) -> float:
        """The fraction of the step in which workers were idle."""
        return 1 - sum(self.computed) / (len(self.computed) * self.seconds)

    @property
    def overhead(self) -> float:
        """The seconds beyond the forecast, per action of the worker with most actions."""
        return (self.seconds - self.forecast.seconds) / max(map(len, self.times))

    def text(self) -> str:
        lines = [
            f"step {1e3 * self.seconds:.3f} ms, forecast {1e3 * self.forecast.seconds:.3f} ms: "
            f"{1e6 * self.overhead:.0f} us per action beyond it",
            f"bubble {self.bubble:.3f}, forecast {self.forecast.bubble:.3f}",
        ]
        for worker, (computed, waited, most) in enumerate(
            zip(self.computed, self.waited, self.recordings, strict=True)
        ):
            lines.append(
                f"worker {worker}: computed {1e3 * computed:.3f} ms, waited {1e3 * waited:.3f} ms, "
                f"at most {most} recordings"
            )
        return "\n".join(lines)

    __str__ = text

    def svg(self) -> str:
        """Return a picture of the step as it was, as SVG. On several machines it is as exact as their clocks."""
        first = min(row[0][0] for row in self.times if row)
        spans = [[(begin - first, end - first) for _, begin, _, end in row] for row in self.times]
        title = f"measured: step {self.seconds:.4g}, bubble {self.bubble:.1%}, recordings {max(self.recordings)}"
        return draw(title, self.schedule, spans, max(self.seconds, *(row[-1][1] for row in spans if row)))

    _repr_svg_ = svg
