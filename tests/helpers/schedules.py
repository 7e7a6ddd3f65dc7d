"""Schedules at random, for comparisons of pipelines with the serial program."""

import itertools
import random
from collections.abc import Sequence

from jdistgrad import pipeline as pp

F, B, I, W = pp.Kind  # noqa: E741


def random_schedule(
    chance: random.Random, inputs: Sequence[Sequence[int] | None], placement: Sequence[int], microbatches: int
) -> pp.Schedule:
    """Return a schedule that takes, again and again, any of the actions that could be next.

    Arguments:
      inputs: the stages that each stage takes inputs from; None: only the batch.
    """
    sources = [set() if mine is None else set(mine) for mine in inputs]
    needs = {}
    for stage, batch in itertools.product(range(len(inputs)), range(microbatches)):
        needs[F, stage, batch] = {(F, source, batch) for source in sources[stage]}
        consumers = [later for later, mine in enumerate(sources) if stage in mine]
        backward = {(F, stage, batch), *((I, later, batch) for later in consumers)}
        if chance.random() < 0.5:
            needs[I, stage, batch], needs[W, stage, batch] = backward, {(I, stage, batch)}
        else:
            needs[B, stage, batch] = backward
    done, rows = set(), [[] for _ in range(max(placement) + 1)]
    while needs:
        kind, stage, batch = chance.choice([one for one, before in needs.items() if before <= done])
        del needs[kind, stage, batch]
        done.add((I if kind is B else kind, stage, batch))
        rows[placement[stage]].append(pp.Action(kind, stage, batch))
    return pp.Schedule(placement, rows)
