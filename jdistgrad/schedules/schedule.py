"""Schedules as data: the placement of stages, each worker's actions in order, and what actions cost.

A schedule has no sends and receives: messages are named by stage, microbatch and direction, so their order cannot be
wrong.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdistgrad.errors import ScheduleError


class Kind(enum.Enum):
    """What an action computes; the values are PyTorch's letters.

    ``BACKWARD`` is the whole backward pass of a stage. ``INPUT`` and ``WEIGHT`` are its halves: the gradients of the
    stage's inputs, for which the stages before it wait, and those of its parameters, for which no stage waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    @property
    def words(self) -> str:
        """The kind in words, for errors and pictures."""
        return KINDS[self].words

    __hash__ = object.__hash__  # in C: Enum hashes by name, in Python, and actions are keys of large dictionaries


class KindSpec(NamedTuple):
    """A kind of action, for checks, forecasts, reports and pictures.

    Arguments:
      parts: the kinds that it consists of, whose costs add up; other actions wait for the first of them.
      needs: whose results it waits for, and of which kind.
      keeps: the change in the number of recordings.
      lightness, striped: its look in pictures.
    """

    words: str
    parts: tuple[Kind, ...]
    needs: tuple[tuple[int, Kind], ...]
    keeps: int
    lightness: float
    striped: bool = False


OWN, SOURCES, CONSUMERS = range(3)  # the stage itself; its inputs' stages; the stages that take its result
_F, _B, _I, _W = Kind
KINDS = {
    _F: KindSpec("forward", (_F,), ((SOURCES, _F),), +1, 0.84),
    _B: KindSpec("backward", (_I, _W), ((OWN, _F), (CONSUMERS, _I)), -1, 0.42),
    _I: KindSpec("input gradient", (_I,), ((OWN, _F), (CONSUMERS, _I)), 0, 0.42),
    _W: KindSpec("weight gradient", (_W,), ((OWN, _I),), -1, 0.66, striped=True),
}


class Action(NamedTuple):
    """One computation of one stage with one microbatch. Its ``str`` is PyTorch's notation: ``2F0``."""

    kind: Kind
    stage: int
    microbatch: int

    def __repr__(self) -> str:  # and so str(action)
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """A placement, and the actions of each worker in order.

    Arguments:
      placement: the index of each stage's worker, in the order of the stages.
      actions: the actions of each worker, in the order of the workers.

    Example:
      >>> schedule = Schedule.parse("0F0,0F1,0B0,0B1\\n1F0,1B0,1F1,1B1")
      >>> schedule.placement, schedule.microbatches
      ((0, 1), 2)
    """

    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", tuple(self.placement))
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        if not self.placement or not any(self.actions):
            raise ScheduleError("A schedule has at least one stage and one action; this one has none.")
        for stage, worker in enumerate(self.placement):
            if worker not in range(self.workers):
                there = f"there are actions of {self.workers} workers: 0 to {self.workers - 1}"
                raise ScheduleError(f"Stage {stage} is placed on worker {worker!r}, but {there}.")
        for worker, row in enumerate(self.actions):
            mine = [stage for stage, place in enumerate(self.placement) if place == worker]
            for action in row:
                if type(action) is not Action or action.stage not in mine or not action.microbatch >= 0:
                    raise ScheduleError(
                        f"Worker {worker} has {action!r} among its actions. Expected Action(kind, stage, microbatch) "
                        f"with one of its stages, which are {mine}, and a microbatch of 0 or more."
                    )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.actions)

    @functools.cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(action.microbatch for row in self.actions for action in row)

    @functools.cached_property
    def trains(self) -> bool:
        """Whether there is any backward action."""
        return any(action.kind is not Kind.FORWARD for row in self.actions for action in row)

    def text(self) -> str:
        """Return the schedule in PyTorch's notation, one line per worker: ``0F0,0F1,0B0,0B1``."""
        return "\n".join(",".join(map(str, row)) or IDLE for row in self.actions)

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read a schedule from its text, or from PyTorch's CSV: a line for each worker, also without actions.

        Idle steps (empty cells) and PyTorch's communication (``SEND_F``, ``UNSHARD`` ...) are ignored. An
        ``OVERLAP_F_B`` is read as its parts, one after the other. A stage is placed on the worker that runs it.
        """
        lines = text.strip("\ufeff \t\r\n").splitlines()
        rows = [tuple(_actions_of(line, worker)) for worker, line in enumerate(lines)]
        placement: dict[int, int] = {}
        for worker, row in enumerate(rows):
            for stage in {action.stage for action in row}:
                if placement.setdefault(stage, worker) != worker:
                    both = f"{placement[stage]} and of worker {worker}"
                    raise ScheduleError(f"Stage {stage} is in the lines of worker {both}: a stage is on one worker.")
        for stage in range(len(placement)):
            if stage not in placement:
                raise ScheduleError(f"No worker runs stage {stage}, but one runs stage {max(placement)}.")
        return cls(tuple(placement[stage] for stage in range(len(placement))), tuple(rows))

    __str__ = text

    def __repr__(self) -> str:
        return f"<Schedule of {self.stages} stages on {self.workers} workers, {self.microbatches} microbatches>"


IDLE = ","  # the line of a worker without actions: two empty cells
ACTION = re.compile(rf"(\d+)([{''.join(kind.value for kind in Kind)}])(\d+)")
COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def _actions_of(line: str, worker: int) -> Iterator[Action]:
    for column, cell in enumerate(line.split(",")):
        word = cell.strip(' \t"')
        overlapped = OVERLAP.fullmatch(word)
        for part in map(str.strip, overlapped[1].split(";") if overlapped else [word]):
            if found := ACTION.fullmatch(part):
                yield Action(Kind(found[2]), int(found[1]), int(found[3]))
            elif part and not COMMUNICATION.fullmatch(part):
                where = f"Line {worker + 1}, cell {column + 1}"
                raise ScheduleError(f"{where}: {part!r} is no action. Expected stage, F, B, I or W, microbatch: 2F0.")


PerStage = float | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The seconds that actions take; by default, in units of a forward pass.

    Arguments:
      forward, input, weight: of an action of that kind: a number, or one per stage.
      backward: the same; by default the sum of ``input`` and ``weight``.
      action: the overhead of each action.
      message: the latency of a result to another worker.
    """

    forward: PerStage = 1.0
    backward: PerStage | None = None
    input: PerStage = 1.0
    weight: PerStage = 1.0
    action: float = 0.0
    message: float = 0.0

    def of_stages(self, stages: int) -> dict[Kind, list[float]]:
        """Return the duration of each kind of action on each stage, with its overhead."""
        action, _ = (_checked(name, getattr(self, name), ()) for name in ("action", "message"))

        def cost(kind: Kind) -> Any:
            name, parts = kind.name.lower(), KINDS[kind].parts
            if getattr(self, name) is None and len(parts) > 1:
                return np.sum([cost(one) for one in parts], axis=0)
            return _checked(name, getattr(self, name), (stages,))

        return {kind: (cost(kind) + action).tolist() for kind in Kind}


def _checked(name: str, cost: PerStage, shape: tuple[int, ...]) -> np.ndarray:
    try:
        each = np.broadcast_to(np.asarray(cost), shape)
    except ValueError:
        each = np.array(None)
    if each.dtype.kind not in "iuf" or not ((each >= 0) & (each < np.inf)).all():
        more = f", or one for each of {shape[0]} stages" if shape else ""
        raise ScheduleError(f"The cost {name}= is {cost!r}; expected a number of seconds{more}.")
    return each.astype(np.float64)
