"""What the actions of a schedule cost."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jdistgrad.errors import ScheduleError
from jdistgrad.schedules.schedule import Kind

PerStage = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds that actions take; by default, in units of a forward pass.

    Arguments:
      forward, input, weight: of an action of that kind: a number, or one per stage.
      backward: the same; by default the sum of ``input`` and ``weight``.
      action: what each action costs in addition.
      message: how long a result is under way to another worker.
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input: PerStage = 1.0
    weight: PerStage = 1.0
    action: float = 0.0
    message: float = 0.0

    def of_stages(self, stages: int) -> dict[Kind, list[float]]:
        """Return the duration of each kind of action on each stage, with the cost of an action in it."""
        names = [kind.name.lower() for kind in Kind if kind is not Kind.BACKWARD or self.backward is not None]
        each = {name: _checked(name, getattr(self, name), (stages,)) for name in names}
        each |= {name: _checked(name, getattr(self, name), ()) for name in ("action", "message")}
        each.setdefault("backward", each["input"] + each["weight"])
        return {kind: (each[kind.name.lower()] + each["action"]).tolist() for kind in Kind}


def _checked(name: str, cost: PerStage, shape: tuple[int, ...]) -> np.ndarray:
    try:
        each = np.broadcast_to(np.asarray(cost), shape)
    except ValueError:
        each = np.array(None)
    if each.dtype.kind not in "iuf" or not ((each >= 0) & (each < np.inf)).all():
        more = f", or one for each of {shape[0]} stages" if shape else ""
        raise ScheduleError(f"The cost {name}= is {cost!r}; expected a number of seconds{more}.")
    return each.astype(np.float64)
