"""When each action of a schedule begins and ends, if every worker goes on as soon as it can. A pure function."""

import math
from collections.abc import Sequence

from jdistgrad.pipeline.costs import Costs
from jdistgrad.pipeline.schedule import Kind, Schedule

Span = tuple[float, float]
Result = tuple[Kind, int, int]  # an output (FORWARD) or the gradients of inputs (INPUT) of a stage, of a microbatch
NEVER = math.inf

FORWARD, BACKWARD, INPUT, WEIGHT = Kind
GIVES = {FORWARD: FORWARD, BACKWARD: INPUT, INPUT: INPUT, WEIGHT: WEIGHT}  # others wait for B as they wait for I


def play(
    schedule: Schedule, sources: Sequence[Sequence[int]], costs: Costs
) -> tuple[list[list[Span]], dict[int, Result]]:
    """Return the span of each worker's actions, and of each worker that cannot end the result it waits for.

    ``sources`` are the stages that each stage takes inputs from.
    """
    place, seconds = schedule.placement, costs.of_stages(schedule.stages)
    ends = {kind: [[NEVER] * schedule.microbatches for _ in place] for kind in (FORWARD, INPUT, WEIGHT)}
    needed = {  # by kind and stage: the ends of what an action needs, how long that is under way, and its name
        kind: [
            [(ends[of][other], costs.message * (place[stage] != place[other]), (of, other)) for of, other in needs]
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
            for there, under_way, source in needed[kind][stage]:
                when = there[batch] + under_way
                if when == NEVER:
                    waiting.setdefault((*source, batch), []).append(worker)
                    break
                if when > start:
                    start = when
            else:
                free = start + seconds[kind][stage]
                done.append((start, free))
                gives = GIVES[kind]
                ends[gives][stage][batch] = free
                ready += waiting.pop((gives, stage, batch), ())
                continue
            break
    return spans, {worker: result for result, workers in waiting.items() for worker in workers}


def needs_of(sources: Sequence[Sequence[int]]) -> dict[Kind, list[list[tuple[Kind, int]]]]:
    """Return the kinds and stages of the results that an action needs, by its kind and stage."""
    stages = range(len(sources))
    backward = [
        [(FORWARD, stage), *((INPUT, target) for target in stages if stage in sources[target])] for stage in stages
    ]
    forward = [[(FORWARD, source) for source in sources[stage]] for stage in stages]
    return {FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: [[(INPUT, stage)] for stage in stages]}
