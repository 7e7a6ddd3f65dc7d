"""What a pipeline is given, checked, and what each of its workers has to know of it."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline.stages import Stage, StageFunction
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.schedules.schedule import Action, Schedule


class Plan(NamedTuple):
    """What all workers of a pipeline know.

    Arguments:
      ranks: of each stage, the rank of its worker.
      inputs: of each stage, the stages whose results it takes, in the order of its arguments.
      consumers: of each stage, the stages that take its result.
      trained: of each stage, whether its result depends on parameters: else it gets no cotangents.
      averaging: the stages that average their gradients, in the order in which those on one worker do.
    """

    ranks: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    trained: tuple[bool, ...]
    microbatches: int
    trains: bool
    averaging: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one worker does in every step. It stays on the worker between steps: its functions are compiled once.

    Arguments:
      actions: the worker's own.
      functions, parameters, averages: by stage, of the stages of this worker.
    """

    plan: Plan
    actions: tuple[Action, ...]
    functions: dict[int, StageFunction]
    parameters: dict[int, Any]
    averages: dict[int, RRef[Any]]

    @property
    def is_last(self) -> bool:
        return len(self.plan.ranks) - 1 in self.functions


def as_stage(given: Any) -> Stage:
    """Return the stage that a user has given: a ``Stage``, a pair, or a function or module on another worker."""
    if isinstance(given, tuple) and len(given) == 2:
        given = Stage(*given)
    elif _is_module(given):
        given = Stage(given)
    if isinstance(given, Stage) and _is_module(given.function):
        module: Any = given.function
        if module.state is not None:
            raise TypeError(
                f"{module!r:.80} has state that calls change (batch statistics, random generators), but microbatches "
                "have no order among themselves. Use a module without state, or call it in eval mode by jd.rpc_sync."
            )
        parameters = module.parameters if given.parameters is None else given.parameters
        given = dataclasses.replace(given, function=module.apply, parameters=parameters)
    if not isinstance(given, Stage) or not callable(given.function):
        raise TypeError(
            f"a stage is jd.pipeline.Stage(function, parameters), a pair of them, a RemoteFunction or a RemoteModule; "
            f"not {given!r:.80}"
        )
    if not (given.average is None or isinstance(given.average, RRef)):
        raise TypeError(
            f"average of {describe(given.function)} is a {type(given.average).__name__}, expected a reference to a "
            "DataParallel that the stage's worker has made: jd.remote(worker, make_data_parallel)"
        )
    for leaf in references_of(given.parameters):
        if not isinstance(leaf, RRef):
            raise TypeError(
                f"the parameters of {describe(given.function)} are a {type(leaf).__name__}, expected a reference to "
                "them, a tree of references, or None: jd.remote(worker, make_parameters)"
            )
    return given


def references_of(parameters: Any) -> list[RRef[Any]]:
    """Return the references in a stage's parameters: one, several, or none. The stage runs beside the first."""
    return jax.tree.leaves(parameters, is_leaf=is_reference)


def is_reference(node: Any) -> bool:
    return isinstance(node, RRef)


def _is_module(given: Any) -> bool:
    return all(hasattr(given, name) for name in ("apply", "parameters", "state"))


def averaging_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the stages that average their gradients, in the order in which those on one worker do: from the last."""
    averaging: dict[RRef[Any], list[bool]] = {}
    for stage in stages:
        for one in references_of(stage.parameters):
            averaging.setdefault(one, []).append(stage.average is not None)
    for number, stage in enumerate(stages):
        if stage.average is None and any(any(averaging[one]) for one in references_of(stage.parameters)):
            raise ValueError(
                f"stage {number} shares its parameters with a stage that has average=, but has none: only a part of "
                "their gradient would be averaged, and the replicas would come apart. Give it one, on the same worker "
                "the same."
            )
    return tuple(number for number in reversed(range(len(stages))) if stages[number].average is not None)


def consumers_of(inputs: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    stages = range(len(inputs))
    found = tuple(tuple(later for later in stages if stage in inputs[later]) for stage in stages)
    for stage in stages[:-1]:
        if not found[stage]:
            raise ScheduleError(
                f"no stage takes the result of stage {stage}. Name it among the inputs of a later one, or leave it out."
            )
    return found


def ranks_of(stages: Sequence[Stage], schedule: Schedule, workers: Sequence[AnyWorker] | None) -> tuple[int, ...]:
    find = current_worker().directory.find
    if workers is not None:
        if len(workers) != schedule.workers:
            raise ScheduleError(f"the schedule has {schedule.workers} workers, but workers= names {len(workers)}")
        return tuple(find(workers[index]).rank for index in schedule.placement)
    owners: dict[int, int] = {}
    for number, (stage, index) in enumerate(zip(stages, schedule.placement, strict=True)):
        owner = next((one.owner for one in references_of(stage.parameters)), None)
        if owner is not None and owners.setdefault(index, owner.rank) != owner.rank:
            raise ScheduleError(
                f"the schedule has stage {number} on its worker {index}, whose other stages have their parameters on "
                f"{find(owners[index])}; those of stage {number} are on {owner}. Make them where the stage runs, or "
                "say where stages run: Pipeline(..., workers=)."
            )
    for index in set(schedule.placement) - set(owners):
        raise ScheduleError(
            f"the stages of the schedule's worker {index} have no parameters to run beside: Pipeline(..., workers=)"
        )
    return tuple(owners[index] for index in schedule.placement)
