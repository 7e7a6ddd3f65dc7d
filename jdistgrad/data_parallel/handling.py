"""How the gradients of one step are to be treated."""

import dataclasses
from typing import Any

from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.rolls import Act, Joining
from jdistgrad.data_parallel.statistics import Clock


@dataclasses.dataclass
class Handling:
    """One step's.

    Arguments:
      step: its number.
      hook: what to do with a bucket instead of averaging it.
      states: the hook's, by bucket; it changes them.
      overwrite: whether averages may be written over the gradients.
      clock: where its times are noted.
      act: what the other ranks are told of it: REDUCE or AVERAGE.
      joining: in which kind of ``join`` block it began.
    """

    step: int
    hook: Hook | None
    states: dict[int, Any]
    overwrite: bool = True
    clock: Clock = dataclasses.field(default_factory=Clock)
    act: Act = Act.REDUCE
    joining: Joining = Joining.NONE
