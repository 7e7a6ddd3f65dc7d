"""When each action of a schedule begins and ends, if every worker goes on as soon as it can. A pure function."""

import dataclasses
import math
from collections.abc import Sequence

from jdistgrad.pipeline.costs import Costs
from jdistgrad.pipeline.schedule import Kind, Schedule

Span = tuple[float, float]
Result = tuple[Kind, int, int]  # an output (FORWARD) or the gradients of inputs (INPUT) of a stage, of a microbatch
NEVER = math.inf

FORWARD, BACKWARD, INPUT, WEIGHT = Kind
GIVES = {FORWARD: FORWARD, BACKWARD: INPUT, INPUT: INPUT, WEIGHT: WEIGHT}  # for a result, a backward pass is its half


@dataclasses.dataclass(frozen=True)
class Play:
    """The start and the end of each worker's actions, and the results that workers wait for without end."""

    spans: list[list[Span]]
    stuck: dict[int, Result]


def play(schedule: Schedule, sources: Sequence[Sequence[int]], costs: Costs) -> Play:
    """Carry a schedule out on paper. ``sources`` are the stages that each stage takes inputs from."""
    seconds = costs.of_stages(schedule.stages)
    there = {kind: [[NEVER] * schedule.microbatches for _ in sources] for kind in (FORWARD, INPUT, WEIGHT)}
    needed = {
        kind: [
            [(of, other, there[of][other], delay(schedule, stage, other, costs)) for of, other in needs]
            for stage, needs in enumerate(each)
        ]
        for kind, each in needs_of(sources).items()
    }
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    waiting: dict[Result, list[int]] = {}
    ready = list(range(schedule.workers))
    while ready:
        worker = ready.pop()
        done = spans[worker]
        free = done[-1][1] if done else 0.0
        for kind, stage, batch in schedule.actions[worker][len(done) :]:
            start = free
            for of, other, ends, under_way in needed[kind][stage]:
                end = ends[batch] + under_way
                if end == NEVER:
                    waiting.setdefault((of, other, batch), []).append(worker)
                    break
                if end > start:
                    start = end
            else:
                free = start + seconds[kind][stage]
                done.append((start, free))
                gives = GIVES[kind]
                there[gives][stage][batch] = free
                ready += waiting.pop((gives, stage, batch), ())
                continue
            break
    return Play(spans, {worker: result for result, workers in waiting.items() for worker in workers})


def needs_of(sources: Sequence[Sequence[int]]) -> dict[Kind, list[list[tuple[Kind, int]]]]:
    """Return the results that each kind of action of each stage needs: their kinds and stages."""
    stages = range(len(sources))
    forward = [[(FORWARD, source) for source in sources[stage]] for stage in stages]
    targets = [[(INPUT, target) for target in stages if stage in sources[target]] for stage in stages]
    backward = [[(FORWARD, stage), *targets[stage]] for stage in stages]
    return {FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: [[(INPUT, stage)] for stage in stages]}


def delay(schedule: Schedule, stage: int, other: int, costs: Costs) -> float:
    return 0.0 if schedule.placement[stage] == schedule.placement[other] else costs.message
