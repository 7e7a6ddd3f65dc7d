"""Check a pipeline's arguments, and cut it into parts, which its workers keep."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad.errors import ScheduleError
from jdistgrad.pipeline.stages import BATCH, Stage, StageFunction
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker
from jdistgrad.schedules.playing import check
from jdistgrad.schedules.schedule import Action, Schedule

Given = tuple[tuple[Any, ...], tuple[Any, ...], Sequence[int]]  # the batch, the targets, the microbatches' sizes


@dataclasses.dataclass(frozen=True)
class PlacedStage:
    """A stage on its worker.

    Arguments:
      inputs: the stages whose results it takes, in the order of its arguments, or ``BATCH``.
      consumers: the stages that take its result.
      trained: whether its result depends on parameters, in a schedule that trains; if not, it gets no cotangents.
      trained_inputs: its inputs that are trained.
    """

    function: StageFunction
    parameters: Any
    inputs: tuple[int, ...]
    consumers: tuple[int, ...]
    trained: bool
    trained_inputs: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one worker does in every step. It stays on the worker, so that its functions are compiled once.

    Arguments:
      ranks: the rank of each stage's worker.
      stages: this worker's, by number.
      averages: the ``DataParallel`` of each stage of this rank, by number, in the order of averaging.
    """

    ranks: tuple[int, ...]
    stages: dict[int, PlacedStage]
    actions: tuple[Action, ...]
    averages: dict[int, RRef[Any]]
    microbatches: int
    trains: bool

    @property
    def last(self) -> PlacedStage | None:
        """The pipeline's last stage, if it is here."""
        return self.stages.get(len(self.ranks) - 1)

    def needed(self, batch: tuple[Any, ...], targets: tuple[Any, ...], sizes: Sequence[int]) -> Given:
        """Return the arguments that the part needs, unsplit: eight small arrays take longer to send."""
        takes_batch = any(BATCH in stage.inputs for stage in self.stages.values())
        return batch if takes_batch else (), targets if self.last else (), sizes


def parts_of(
    stages: Sequence[Stage],
    schedule: Schedule,
    loss: Callable[..., Any] | None,
    workers: Sequence[AnyWorker] | None,
) -> tuple[dict[int, Part], dict[int, int], dict[int, tuple[int, ...]]]:
    """Fit stages, a schedule and workers together, or raise ScheduleError.

    Returns:
      The part of each worker of the schedule that has actions; the rank of each; each stage's input stages.
    """
    if len(stages) != schedule.stages:
        raise ScheduleError(
            f"the schedule is for {schedule.stages} stages, but {len(stages)} were given. Make it with as many "
            "workers (times chunks) as there are stages."
        )
    inputs = [(k - 1,) if one.inputs is None else tuple(one.inputs) for k, one in enumerate(stages)]
    between = {k: tuple(one for one in mine if one != BATCH) for k, mine in enumerate(inputs)}
    check(schedule, between)
    ranks, averages, trained = _ranks_of(stages, schedule, workers), _averages_of(stages), set[int]()
    placed: list[PlacedStage] = []
    for number, stage in enumerate(stages):
        consumers = tuple(later for later, mine in enumerate(inputs) if number in mine)
        if not consumers and number < len(stages) - 1:
            raise ScheduleError(
                f"no stage takes the result of stage {number}. Add it to the inputs of a later stage, or remove it."
            )
        trained_inputs = frozenset(trained.intersection(inputs[number]))
        if schedule.trains and (stage.parameters is not None or trained_inputs):
            trained.add(number)
        function = StageFunction(stage.function, stage.remat, None if consumers else loss)
        placed.append(
            PlacedStage(function, stage.parameters, inputs[number], consumers, number in trained, trained_inputs)
        )
    parts = {}
    for index, row in enumerate(schedule.actions):
        here = {number: one for number, one in enumerate(placed) if schedule.placement[number] == index}
        if row:
            rank = ranks[next(iter(here))]
            mine = {number: one for number, one in averages.items() if schedule.trains and ranks[number] == rank}
            parts[index] = Part(ranks, here, row, mine, schedule.microbatches, schedule.trains)
    return parts, dict(zip(schedule.placement, ranks, strict=True)), between


def as_stage(given: Any) -> Stage:
    """Convert a user's stage: a ``Stage``, a pair, or a remote function or module."""
    if isinstance(given, tuple) and len(given) == 2:
        given = Stage(*given)
    elif _is_module(given):
        given = Stage(given)
    if isinstance(given, Stage) and _is_module(given.function):
        module: Any = given.function
        if module.state is not None:
            raise TypeError(
                f"{module!r:.80} has state that calls change (batch statistics, random generators), but microbatches "
                "have no order. Use a module without state, or call it in eval mode by jd.rpc_sync."
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


def _is_module(given: Any) -> bool:
    return all(hasattr(given, name) for name in ("apply", "parameters", "state"))


def is_reference(node: Any) -> bool:
    return isinstance(node, RRef)


def references_of(parameters: Any) -> list[RRef[Any]]:
    """Return the references in a stage's parameters. The stage runs on the owner of the first."""
    return jax.tree.leaves(parameters, is_leaf=is_reference)


def _averages_of(stages: Sequence[Stage]) -> dict[int, RRef[Any]]:
    """Return the averages of stages, by number, in the order of averaging: from the last stage."""
    found = {number: one.average for number, one in reversed([*enumerate(stages)]) if one.average is not None}
    averaging = {reference for number in found for reference in references_of(stages[number].parameters)}
    for number, stage in enumerate(stages):
        if number not in found and not averaging.isdisjoint(references_of(stage.parameters)):
            raise ValueError(
                f"stage {number} shares its parameters with a stage that has average=, but has none: only a part of "
                "their gradient would be averaged, and the replicas would diverge. Give it the same average=."
            )
    return found


def _ranks_of(stages: Sequence[Stage], schedule: Schedule, workers: Sequence[AnyWorker] | None) -> tuple[int, ...]:
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
                "place stages by Pipeline(..., workers=)."
            )
    for index in set(schedule.placement) - set(owners):
        raise ScheduleError(
            f"the stages of the schedule's worker {index} have no parameters. Place them: Pipeline(..., workers=)"
        )
    return tuple(owners[index] for index in schedule.placement)
