"""What the actions of a schedule cost."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline.schedule import Kind

PerStage = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds of the actions of a schedule; by default, units of a forward pass.

    Arguments:
      forward, input, weight: of an action of that kind: a number, or one per stage.
      backward: the same; by default the sum of ``input`` and ``weight``.
      action: what each action costs in addition.
      message: how long a result is under way to another worker.

    Example:
      >>> Costs(forward=[1, 2], message=0.1).of_stages(2)[Kind.FORWARD]
      [1.0, 2.0]
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input: PerStage = 1.0
    weight: PerStage = 1.0
    action: float = 0.0
    message: float = 0.0

    def of_stages(self, stages: int) -> Mapping[Kind, list[float]]:
        """Return the duration of each kind of action on each stage, with the cost of an action in it."""
        action = _checked("action", self.action)
        _checked("message", self.message)
        halves = {
            kind: _per_stage(kind, getattr(self, kind.name.lower()), stages) for kind in (Kind.INPUT, Kind.WEIGHT)
        }
        whole = (
            [sum(pair) for pair in zip(*halves.values(), strict=True)]
            if self.backward is None
            else _per_stage(Kind.BACKWARD, self.backward, stages)
        )
        found = {Kind.FORWARD: _per_stage(Kind.FORWARD, self.forward, stages), Kind.BACKWARD: whole, **halves}
        return {kind: [action + seconds for seconds in each] for kind, each in found.items()}


def _per_stage(kind: Kind, cost: PerStage, stages: int) -> list[float]:
    name = kind.name.lower()
    each = [cost] * stages if isinstance(cost, numbers.Real) else list(cost)  # type: ignore[arg-type]
    if len(each) != stages:
        raise ScheduleError(f"The costs {name}= are {len(each)} numbers, but the schedule has {stages} stages.")
    return [_checked(name, one) for one in each]


def _checked(name: str, cost: float) -> float:
    if not isinstance(cost, numbers.Real) or not 0 <= cost < math.inf:
        raise ScheduleError(f"The cost {name}= is a number of seconds, zero or more; not {cost!r}.")
    return float(cost)
