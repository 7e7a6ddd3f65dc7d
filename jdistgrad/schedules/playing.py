"""When each action of a schedule begins and ends, if every worker goes on as soon as it can.

So it shows whether the schedule can be carried out: each action once, and no worker waits for ever. Pure functions.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from jdistgrad.errors import ScheduleError
from jdistgrad.schedules.schedule import Action, Costs, Kind, Schedule

Span = tuple[float, float]
Result = tuple[Kind, int, int]  # an output (FORWARD) or the gradients of inputs (INPUT) of a stage, of a microbatch
Inputs = Mapping[int, Sequence[int]]
NEVER = math.inf
SHOWN = 5  # actions named in an error

FORWARD, BACKWARD, INPUT, WEIGHT = Kind
GIVES = {FORWARD: FORWARD, BACKWARD: INPUT, INPUT: INPUT, WEIGHT: WEIGHT}  # others wait for B as they wait for I


def play(
    schedule: Schedule, sources: Sequence[Sequence[int]], costs: Costs
) -> tuple[list[list[Span]], dict[int, Result]]:
    """Return the span of each worker's actions, and of each worker that cannot end the result it waits for.

    ``sources`` are the stages that each stage takes inputs from.
    """
    seconds, place, stages = costs.of_stages(schedule.stages), schedule.placement, range(schedule.stages)
    ends = {kind: [[NEVER] * schedule.microbatches for _ in stages] for kind in Kind}  # of results

    def needs(here: int, kind: Kind, others: Iterable[int]) -> list[tuple[list[float], float, Kind, int]]:
        """Return when results of other stages end, and how long each is under way to a stage."""
        return [(ends[kind][one], costs.message * (place[here] != place[one]), kind, one) for one in others]

    forward = [needs(stage, FORWARD, sources[stage]) for stage in stages]
    consumers = [[later for later in stages if stage in sources[later]] for stage in stages]
    backward = [needs(stage, FORWARD, [stage]) + needs(stage, INPUT, consumers[stage]) for stage in stages]
    weight = [needs(stage, INPUT, [stage]) for stage in stages]
    needs_of = {FORWARD: forward, BACKWARD: backward, INPUT: backward, WEIGHT: weight}

    waiting: dict[Result, list[int]] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ready = list(range(schedule.workers))
    while ready:
        worker = ready.pop()
        done = spans[worker]
        free = done[-1][1] if done else 0.0
        for kind, stage, batch in schedule.actions[worker][len(done) :]:  # until it must wait
            start, lacking = free, None
            for there, delay, given, other in needs_of[kind][stage]:
                when = there[batch] + delay
                if when == NEVER:
                    lacking = given, other, batch
                    break
                if when > start:
                    start = when
            if lacking is not None:
                waiting.setdefault(lacking, []).append(worker)
                break
            result = GIVES[kind], stage, batch
            ends[result[0]][stage][batch] = free = start + seconds[kind][stage]
            done.append((start, free))
            if result in waiting:
                ready += waiting.pop(result)
    return spans, {worker: result for result, workers in waiting.items() for worker in workers}


def check(schedule: Schedule, inputs: Inputs | None = None) -> None:
    """Check that a schedule is complete and ends, or raise ``ScheduleError``.

    Every stage must have one forward pass of each microbatch and, if the schedule trains, either one backward pass or
    both its halves. No workers may wait for each other: the error names their actions.

    Arguments:
      schedule: the schedule.
      inputs: the earlier stages that a stage takes its inputs from, for the stages that do not take them from the stage
        before alone: ``{3: (0, 2)}``.
    """
    played(schedule, inputs, Costs())


def played(schedule: Schedule, inputs: Inputs | None, costs: Costs) -> list[list[Span]]:
    """Return the start and the end of each worker's actions, of a schedule that is checked."""
    _check_complete(schedule)
    spans, stuck = play(schedule, sources_of(schedule.stages, inputs), costs)
    if stuck:
        raise _deadlock(schedule, [len(done) for done in spans], stuck)
    return spans


def sources_of(stages: int, inputs: Inputs | None) -> list[tuple[int, ...]]:
    """Return the stages that each stage takes inputs from: the one before it, unless ``inputs`` says otherwise."""
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
    batches = schedule.microbatches
    found: dict[Kind, set[int]] = {kind: set() for kind in Kind}  # numbers: so many pairs would call the collector
    for row in schedule.actions:
        for kind, stage, batch in row:
            found[kind].add(stage * batches + batch)
    if sum(map(len, found.values())) != sum(map(len, schedule.actions)):
        counts = Counter(itertools.chain(*schedule.actions))
        twice = [action for action, count in counts.items() if count > 1]
        raise ScheduleError(f"Each action is done once, but {_named(twice)} stand more than once in the schedule.")
    whole, halves = found[BACKWARD], found[INPUT] | found[WEIGHT]
    if whole & halves:
        both = [Action(BACKWARD, *divmod(one, batches)) for one in sorted(whole & halves)]
        raise ScheduleError(f"{_named(both)}: a backward pass is done whole (B) or in halves (I and W), not both.")
    backward = [BACKWARD] if schedule.trains else []
    missing = (
        Action(kind, *divmod(one, batches))
        for one in range(schedule.stages * batches)
        for kind in (FORWARD, *([INPUT, WEIGHT] if one in halves else backward))
        if one not in found[kind]
    )
    if some := list(itertools.islice(missing, SHOWN + 1)):
        sizes = f"{schedule.stages} stages and {schedule.microbatches} microbatches"
        raise ScheduleError(f"The schedule has {sizes}, but not {_named(some)}.")


def _named(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions[:SHOWN])) + " and more" * (len(actions) > SHOWN)


def _deadlock(schedule: Schedule, position: Sequence[int], stuck: Mapping[int, Result]) -> ScheduleError:
    """Follow who waits for whom until a worker comes again: those from there on wait for each other."""
    seen: list[int] = []
    worker = next(iter(stuck))
    while worker not in seen:
        seen.append(worker)
        worker = schedule.placement[stuck[worker][1]]
    heads = {one: schedule.actions[one][position[one]] for one in seen[seen.index(worker) :]}
    reasons = []
    for one, head in heads.items():
        other = schedule.placement[stuck[one][1]]
        wanted = next(each for each in schedule.actions[other] if (GIVES[each.kind], *each[1:]) == stuck[one])
        reasons.append(f"{head} on worker {one} waits for {wanted}, which worker {other} has after {heads[other]}")
    return ScheduleError(
        f"The schedule would never end: {'; '.join(reasons)}. Put what is waited for before what waits.",
        waiting=tuple((head, one) for one, head in heads.items()),
    )
