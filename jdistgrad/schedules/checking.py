"""Whether a schedule can be carried out: each action once, and no worker waits for ever."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jdistgrad.errors import ScheduleError
from jdistgrad.schedules.costs import Costs
from jdistgrad.schedules.playing import BACKWARD, FORWARD, GIVES, INPUT, WEIGHT, Result, Span, play
from jdistgrad.schedules.schedule import Action, Kind, Schedule

Inputs = Mapping[int, Sequence[int]]

SHOWN = 5  # actions named in an error


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
        found[stage] = _checked(stage, sources)
    return found


def _checked(stage: int, sources: Any) -> tuple[int, ...]:
    if not isinstance(sources, Sequence):
        raise ScheduleError(f"inputs= has {sources!r} for stage {stage}, expected a tuple of stages: (0, 2).")
    for source in sources:
        if not isinstance(source, int) or source not in range(stage):
            earlier = f"of earlier stages: 0 to {stage - 1}" if stage else "of none: the first stage takes the batch"
            raise ScheduleError(f"Stage {stage} takes the result of stage {source!r}; expected results {earlier}.")
    return tuple(dict.fromkeys(sources))


def _check_complete(schedule: Schedule) -> None:
    """Check that each stage has each microbatch once."""
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
