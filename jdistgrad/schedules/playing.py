"""Simulate a schedule: when each action begins and ends, and whether the schedule is complete and ends at all."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jdistgrad.errors import ScheduleError
from jdistgrad.schedules.schedule import CONSUMERS, KINDS, OWN, SOURCES, Action, Costs, Kind, Schedule

Span = tuple[float, float]
Result = tuple[Kind, int, int]  # an output (FORWARD) or the gradients of inputs (INPUT) of a stage, of a microbatch
Inputs = Mapping[int, Sequence[int]]
NEVER = math.inf
SHOWN = 5  # actions named in an error


def play(
    schedule: Schedule, sources: Sequence[Sequence[int]], costs: Costs
) -> tuple[list[list[Span]], dict[int, Result]]:
    """Return the spans of each worker's actions; and for each worker that never ends, the result that it waits for.

    ``sources``: the input stages of each stage.
    """
    seconds, place, stages = costs.of_stages(schedule.stages), schedule.placement, range(schedule.stages)
    ends = {kind: [[NEVER] * schedule.microbatches for _ in stages] for kind in Kind}  # of results

    of = {OWN: [[stage] for stage in stages], SOURCES: sources}
    of[CONSUMERS] = [[later for later in stages if stage in sources[later]] for stage in stages]
    needs = {  # for each result that an action of a stage needs: when it ends, its latency, and which it is
        kind: [
            [
                (ends[what][one], costs.message * (place[stage] != place[one]), what, one)
                for whose, what in spec.needs
                for one in of[whose][stage]
            ]
            for stage in stages
        ]
        for kind, spec in KINDS.items()
    }
    waiting: dict[Result, list[int]] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ready = list(range(schedule.workers))
    while ready:
        worker = ready.pop()
        done = spans[worker]
        free = done[-1][1] if done else 0.0
        for kind, stage, batch in schedule.actions[worker][len(done) :]:  # until it must wait
            start, lacking = free, None
            for there, delay, given, other in needs[kind][stage]:
                when = there[batch] + delay
                if when == NEVER:
                    lacking = given, other, batch
                    break
                if when > start:
                    start = when
            if lacking is not None:
                waiting.setdefault(lacking, []).append(worker)
                break
            result = KINDS[kind].parts[0], stage, batch
            ends[result[0]][stage][batch] = free = start + seconds[kind][stage]
            done.append((start, free))
            if result in waiting:
                ready += waiting.pop(result)
    return spans, {worker: result for result, workers in waiting.items() for worker in workers}


def check(schedule: Schedule, inputs: Inputs | None = None) -> None:
    """Check that a schedule is complete and ends, or raise ``ScheduleError``.

    Every stage must have one forward pass of each microbatch and, if the schedule trains, either one backward pass or
    both its halves. Workers must not deadlock: the error names their actions.

    Arguments:
      schedule: the schedule.
      inputs: the input stages of those stages that do not just take the result of the stage before: ``{3: (0, 2)}``.
    """
    played(schedule, inputs, Costs())


def played(schedule: Schedule, inputs: Inputs | None, costs: Costs) -> list[list[Span]]:
    """Check a schedule; return the start and the end of each worker's actions."""
    _check_complete(schedule)
    spans, stuck = play(schedule, sources_of(schedule.stages, inputs), costs)
    if stuck:
        raise _deadlock(schedule, [len(done) for done in spans], stuck)
    return spans


def sources_of(stages: int, inputs: Inputs | None) -> list[tuple[int, ...]]:
    """Return the input stages of each stage: by default the one before it."""
    found: list[tuple[int, ...]] = [(stage - 1,) if stage else () for stage in range(stages)]
    for stage, sources in (inputs or {}).items():
        if stage not in range(stages):
            raise ScheduleError(f"inputs= has stage {stage!r}, expected one of the {stages} stages: 0 to {stages - 1}.")
        for source in sources:
            if source not in range(stage):
                earlier = (
                    f"of earlier stages: 0 to {stage - 1}" if stage else "of none: the first stage takes the batch"
                )
                raise ScheduleError(f"Stage {stage} takes the result of stage {source!r}; expected results {earlier}.")
        found[stage] = tuple(dict.fromkeys(sources))
    return found


def _check_complete(schedule: Schedule) -> None:
    batches, done = schedule.microbatches, {kind: list[int]() for kind in Kind}  # pairs would call the collector
    for row in schedule.actions:
        for kind, stage, batch in row:
            for part in KINDS[kind].parts:
                done[part].append(stage * batches + batch)

    def named(part: Kind, numbers: Iterable[int]) -> str:
        actions = [str(Action(part, *divmod(one, batches))) for one in sorted(numbers)]
        return ", ".join(actions[:SHOWN]) + " and more" * (len(actions) > SHOWN)

    for part in (Kind.FORWARD, *(KINDS[Kind.BACKWARD].parts if schedule.trains else ())):
        every = set(done[part])
        if len(every) < len(done[part]):
            twice = named(part, [one for one, count in Counter(done[part]).items() if count > 1])
            raise ScheduleError(
                f"Each action is done once, but {twice} are in the schedule more than once. A backward pass is done "
                "whole (B) or in halves (I and W), not both."
            )
        if missing := set(range(schedule.stages * batches)) - every:
            sizes = f"{schedule.stages} stages and {batches} microbatches"
            raise ScheduleError(f"The schedule has {sizes}, but not {named(part, missing)}. (B does both I and W.)")


def _deadlock(schedule: Schedule, position: Sequence[int], stuck: Mapping[int, Result]) -> ScheduleError:
    """Find the cycle of workers that wait for each other."""
    seen: list[int] = []
    worker = next(iter(stuck))
    while worker not in seen:
        seen.append(worker)
        worker = schedule.placement[stuck[worker][1]]
    heads = {one: schedule.actions[one][position[one]] for one in seen[seen.index(worker) :]}
    reasons = []
    for one, head in heads.items():
        other = schedule.placement[stuck[one][1]]
        wanted = next(each for each in schedule.actions[other] if (KINDS[each.kind].parts[0], *each[1:]) == stuck[one])
        reasons.append(f"{head} on worker {one} waits for {wanted}, which worker {other} has after {heads[other]}")
    return ScheduleError(
        f"The schedule would never end: {'; '.join(reasons)}. Put what is waited for before what waits.",
        waiting=tuple((head, one) for one, head in heads.items()),
    )
