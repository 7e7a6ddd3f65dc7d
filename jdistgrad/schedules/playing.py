"""When each action of a schedule begins and ends, if every worker goes on as soon as it can. A pure function."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jdistgrad.schedules.costs import Costs
from jdistgrad.schedules.schedule import Action, Kind, Schedule

Span = tuple[float, float]
Result = tuple[Kind, int, int]  # an output (FORWARD) or the gradients of inputs (INPUT) of a stage, of a microbatch
NEVER = math.inf

FORWARD, BACKWARD, INPUT, WEIGHT = Kind
GIVES = {FORWARD: FORWARD, BACKWARD: INPUT, INPUT: INPUT, WEIGHT: WEIGHT}  # others wait for B as they wait for I


class _Step(NamedTuple):
    """What is known of the actions of one kind on one stage. Its lists and dicts are shared with other steps.

    Arguments:
      needs: of each result that an action needs: when it ends, by microbatch; its time under way; who waits for it.
      duration: of an action.
      ends: when the result of an action ends, by microbatch.
      waiting: by microbatch, the workers that wait for the result.
    """

    needs: list[tuple[list[float], float, dict[int, list[int]]]]
    duration: float
    ends: list[float]
    waiting: dict[int, list[int]]


def play(
    schedule: Schedule, sources: Sequence[Sequence[int]], costs: Costs
) -> tuple[list[list[Span]], dict[int, Result]]:
    """Return the span of each worker's actions, and of each worker that cannot end the result it waits for.

    ``sources`` are the stages that each stage takes inputs from.
    """
    waiting: dict[Kind, list[dict[int, list[int]]]] = {kind: [{} for _ in schedule.placement] for kind in GIVES}
    steps = _steps(schedule, sources, costs, waiting)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ready = list(range(schedule.workers))
    while ready:
        worker = ready.pop()
        ready += _go_on(worker, schedule.actions[worker], spans[worker], steps)
    left = ((kind, stage, queues) for kind, each in waiting.items() for stage, queues in enumerate(each))
    return spans, {
        one: (kind, stage, k) for kind, stage, queues in left for k, queue in queues.items() for one in queue
    }


def _steps(
    schedule: Schedule,
    sources: Sequence[Sequence[int]],
    costs: Costs,
    waiting: dict[Kind, list[dict[int, list[int]]]],
) -> dict[Kind, list[_Step]]:
    """Return the steps by kind and stage. All that can be looked up is, once: schedules have thousands of actions."""
    place, seconds = schedule.placement, costs.of_stages(schedule.stages)
    ends = {kind: [[NEVER] * schedule.microbatches for _ in place] for kind in GIVES}
    return {
        kind: [
            _Step(
                [(ends[of][k], costs.message * (place[stage] != place[k]), waiting[of][k]) for of, k in needs],
                seconds[kind][stage],
                ends[GIVES[kind]][stage],
                waiting[GIVES[kind]][stage],
            )
            for stage, needs in enumerate(each)
        ]
        for kind, each in needs_of(sources).items()
    }


def _go_on(worker: int, row: Sequence[Action], done: list[Span], steps: dict[Kind, list[_Step]]) -> list[int]:
    """Let a worker go on until it must wait; return the workers that can go on now."""
    woken: list[int] = []
    free = done[-1][1] if done else 0.0
    for kind, stage, batch in row[len(done) :]:
        needs, duration, mine, wake = steps[kind][stage]
        start = free
        for there, under_way, queue in needs:
            when = there[batch] + under_way
            if when == NEVER:
                queue.setdefault(batch, []).append(worker)
                return woken
            if when > start:
                start = when
        mine[batch] = free = start + duration
        done.append((start, free))
        woken += wake.pop(batch, ())
    return woken


def needs_of(sources: Sequence[Sequence[int]]) -> dict[Kind, list[list[tuple[Kind, int]]]]:
    """Return the kinds and stages of the results that an action needs, by its kind and stage."""
    stages = range(len(sources))
    backward = [
        [(FORWARD, stage), *((INPUT, target) for target in stages if stage in sources[target])] for stage in stages
    ]
    forward = [[(FORWARD, source) for source in sources[stage]] for stage in stages]
    return {FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: [[(INPUT, stage)] for stage in stages]}
