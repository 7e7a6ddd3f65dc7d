"""Schedules as data: on which worker each stage is, and what each worker does, in order.

No send and no receive stands in a schedule: a message is named by stage, microbatch and direction, so that its order
cannot be wrong.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jdistgrad.errors import ScheduleError


class Kind(enum.Enum):
    """What an action computes; the values are PyTorch's letters.

    ``BACKWARD`` is the whole backward pass of a stage. ``INPUT`` and ``WEIGHT`` are its halves: the gradients of the
    stage's inputs, which the stages before it wait for, and those of its parameters, which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    @property
    def words(self) -> str:
        """The kind in words, as errors and pictures have it."""
        return {"I": "input gradient", "W": "weight gradient"}.get(self.value, self.name.lower())

    __hash__ = object.__hash__  # in C: Enum hashes by name, in Python, and actions are keys of large dictionaries


class Action(NamedTuple):
    """One computation of one stage with one microbatch. Its ``str`` is PyTorch's notation: ``2F0``."""

    kind: Kind
    stage: int
    microbatch: int

    def __repr__(self) -> str:  # and so str(action)
        known = isinstance(self.kind, Kind)
        return f"{self.stage}{self.kind.value}{self.microbatch}" if known else tuple.__repr__(self)


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """A placement, and the actions of each worker in the order in which it carries them out.

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
        try:
            object.__setattr__(self, "placement", tuple(self.placement))
            object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        except TypeError as error:
            raise ScheduleError(
                "A schedule has a placement, the worker of each stage, as (0, 1), and a list of the actions of each "
                f"worker, as [[...], [...]]: {error}."
            ) from None
        if not self.placement or not any(self.actions):
            raise ScheduleError("A schedule has at least one stage and one action; this one has none.")
        for stage, worker in enumerate(self.placement):
            if worker not in range(self.workers):
                there = f"there are actions of {self.workers} workers: 0 to {self.workers - 1}"
                raise ScheduleError(f"Stage {stage} is placed on worker {worker!r}, but {there}.")
        for worker, row in enumerate(self.actions):
            mine = [stage for stage, place in enumerate(self.placement) if place == worker]
            for action in row:
                known = type(action) is Action and type(action.kind) is Kind and isinstance(action.microbatch, int)
                if not known or action.stage not in mine or action.microbatch < 0:
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
        """Read a schedule from its text, or from a CSV file of PyTorch's: a line for each worker, also without actions.

        Idle steps (empty cells) and PyTorch's communication (``SEND_F``, ``UNSHARD`` ...) are left out. An
        ``OVERLAP_F_B`` is read as its parts, one after the other. A stage is placed on the worker that runs it.
        """
        if not isinstance(text, str):
            raise ScheduleError(f"A schedule is read from its text, not from {text!r:.40}: Path(file).read_text().")
        lines = text.strip("\ufeff \t\r\n").splitlines()
        rows = [tuple(_actions_of(line, worker)) for worker, line in enumerate(lines)]
        return cls(_placement_of(rows), tuple(rows))

    __str__ = text

    def __repr__(self) -> str:
        return f"<Schedule of {self.stages} stages on {self.workers} workers, {self.microbatches} microbatches>"


IDLE = ","  # the line of a worker without actions: two empty cells
ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def _actions_of(line: str, worker: int) -> Iterator[Action]:
    """Yield the actions of a worker's line."""
    for column, cell in enumerate(line.split(",")):
        word = cell.strip(' \t"')
        overlapped = OVERLAP.fullmatch(word)
        for part in map(str.strip, overlapped[1].split(";") if overlapped else [word]):
            if found := ACTION.fullmatch(part):
                yield Action(Kind(found[2]), int(found[1]), int(found[3]))
            elif part and not COMMUNICATION.fullmatch(part):
                where = f"Line {worker + 1}, cell {column + 1}"
                raise ScheduleError(f"{where}: {part!r} is no action. Expected stage, F, B, I or W, microbatch: 2F0.")


def _placement_of(rows: Sequence[tuple[Action, ...]]) -> tuple[int, ...]:
    """Place each stage on the worker that runs it."""
    found: dict[int, int] = {}
    for worker, row in enumerate(rows):
        for stage in {action.stage for action in row}:
            if found.setdefault(stage, worker) != worker:
                both = f"{found[stage]} and of worker {worker}"
                raise ScheduleError(f"Stage {stage} stands in the lines of worker {both}: a stage is on one worker.")
    for stage in range(len(found)):
        if stage not in found:
            raise ScheduleError(f"No worker runs stage {stage}, but one runs stage {max(found)}.")
    return tuple(found[stage] for stage in range(len(found)))
