"""What a pipeline sends to its workers in each step, prepared once, and the wait for their answers."""

import concurrent.futures
import functools
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jdistgrad.autograd.tape.links import next_message
from jdistgrad.autograd.tape.program_order import next_place
from jdistgrad.errors import CallTimeoutError, ScheduleError
from jdistgrad.pipeline.checking import check
from jdistgrad.pipeline.report import Report
from jdistgrad.pipeline.schedule import Schedule
from jdistgrad.pipeline.shares import Done, Keep, Part, Plan, Share, doing, forget_done, wait_for_any
from jdistgrad.pipeline.stages import BATCH, Stage, StageFunction
from jdistgrad.rpc.calls.caller import AnyWorker
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.references.rref import RRef, remote
from jdistgrad.rpc.serving.failures import add_note
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.arrays import ALIAS_FROM, as_numpy

ANSWER_SECONDS = 0.5

Future = concurrent.futures.Future[Any]
Split = Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]]  # of each microbatch, the step's arguments and the targets


class Program:
    """Stages, a schedule and workers that fit together.

    Raises:
      ScheduleError: they do not.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        schedule: Schedule,
        loss: Callable[..., Any] | None,
        workers: Sequence[AnyWorker] | None,
    ):
        if len(stages) != schedule.stages:
            raise ScheduleError(
                f"the schedule is for {schedule.stages} stages, but {len(stages)} were given. Make it with as many "
                "workers (or chunks of them) as there are stages."
            )
        inputs = _inputs(stages)
        self.schedule = schedule
        self._between = {k: tuple(one for one in mine if one != BATCH) for k, mine in enumerate(inputs)}
        check(schedule, self._between)
        ranks = _ranks(stages, schedule, workers)
        consumers = tuple(tuple(k for k, mine in enumerate(inputs) if stage in mine) for stage in range(len(stages)))
        _refuse_unused(consumers)
        self.plan = Plan(ranks, inputs, consumers, schedule.microbatches, schedule.trains)
        functions = [StageFunction(one.function, one.remat) for one in stages]
        functions[-1] = StageFunction(stages[-1].function, stages[-1].remat, loss)
        self._parts = [self._part(index, stages, functions) for index in range(schedule.workers)]

    def _part(self, index: int, stages: Sequence[Stage], functions: Sequence[StageFunction]) -> Part:
        mine = [stage for stage, place in enumerate(self.schedule.placement) if place == index]
        return Part(
            self.plan,
            self.schedule.actions[index],
            {stage: functions[stage] for stage in mine},
            {stage: stages[stage].parameters for stage in mine},
            {stage: stages[stage].average for stage in mine if stages[stage].average is not None},
        )

    def _rank(self, index: int) -> int:
        return self.plan.ranks[self.schedule.placement.index(index)]

    @property
    def _own(self) -> int | None:
        """The index of a part that this worker carries out itself while it waits, if it has one."""
        here = current_worker().rank
        return next((index for index in range(len(self._parts)) if self._rank(index) == here), None)

    @property
    def shares_memory(self) -> bool:
        """Whether a step works on the arrays that it was given, and not only on copies."""
        return self._own is not None or current_worker().hands_over

    @functools.cached_property
    def _kept(self) -> dict[int, RRef[Any]]:
        """The parts on other workers: functions that arrived with each step would be compiled in each step."""
        others = [(index, part) for index, part in enumerate(self._parts) if index != self._own]
        with within(None):  # they outlive the context of the step that needs them first
            return {index: remote(self._rank(index), Keep(), (part,), {}, None) for index, part in others}

    def run(self, split: Split, weights: list[float], timeout: float | None) -> tuple[list[Any], Report]:
        """Run the program in the current context; return the last stage's results, and what each worker did when.

        If a worker fails, the context is closed: that ends the waits of all others.
        """
        worker, scope, start = current_worker(), current_scope(), time.monotonic()
        assert scope is not None
        own, share, futures = self._own, Share(next_message(), next_place()), dict[int, Future]()
        done, arguments = dict[int, Done](), tuple[Any, ...]()
        try:
            for index, part in self._kept.items():
                arguments = part, *_brought(self._parts[index], split, weights)
                futures[index] = worker.rpc_async(self._rank(index), share, arguments, {}, timeout)
            if own is not None:
                arguments = self._parts[own], *_brought(self._parts[own], split, weights), list(futures.values())
                done[own] = share(*arguments)
            with as_numpy(below=ALIAS_FROM):  # losses, of which only the sum becomes an array of JAX
                _wait_for_all(worker, futures)
                done |= {index: one.result() for index, one in futures.items()}
        except BaseException as error:
            if isinstance(error, CallTimeoutError):
                self._add_who_does_what(error, worker, share.step, futures)
            worker.releasing.close_scope(scope.id)
            futures.clear()  # they hold the error, whose traceback holds this frame
            arguments = ()
            raise
        seconds, ordered = time.monotonic() - start, [done[index] for index in range(len(self._parts))]
        return next(one.results for one in ordered if one.results), Report(
            self.schedule, self._between, ordered, seconds
        )

    def _add_who_does_what(
        self, error: CallTimeoutError, worker: Worker, step: int, futures: Mapping[int, Future]
    ) -> None:
        """Add what each worker has been doing: all calls of a step time out together, whoever is to blame."""
        asked = {index: worker.rpc_async(self._rank(index), doing, (step,), {}, ANSWER_SECONDS) for index in futures}
        for index, answer in asked.items():
            failed = answer.exception()
            found = f"no answer within {ANSWER_SECONDS:g} s" if failed is not None else answer.result()
            add_note(error, f"{worker.directory.workers[self._rank(index)]}: {found}.")


def _brought(part: Part, split: Split, weights: Sequence[float]) -> tuple[Any, ...]:
    """Return what a step brings to a part: microbatches, targets and weights, if it takes them."""
    batches = [batch for batch, _ in split] if part.takes_batch else []
    return (batches, *(([given for _, given in split], weights) if part.is_last else ([], [])))


def _wait_for_all(worker: Worker, futures: Mapping[int, Future]) -> None:
    """Return when all futures are done. Raise the first error as soon as there is one."""
    waiting = list(futures.values())
    while waiting:
        wait_for_any(worker, waiting)
        forget_done(waiting)


def as_stage(given: Any) -> Stage:
    """Return the stage that a user has given: a ``Stage``, a pair, or a function or module on another worker."""
    if isinstance(given, tuple) and len(given) == 2:
        given = Stage(*given)
    elif hasattr(given, "apply") and hasattr(given, "parameters"):
        if given.state is not None:
            raise TypeError(
                f"{given!r:.80} has state that calls change (batch statistics, random generators), but microbatches "
                "have no order among themselves. Use a module without state, or call it in eval mode by jd.rpc_sync."
            )
        given = Stage(given.apply, given.parameters)
    if not isinstance(given, Stage) or not callable(given.function):
        raise TypeError(
            f"a stage is jd.pipeline.Stage(function, parameters), a pair of them, a RemoteFunction or a RemoteModule; "
            f"not {given!r:.80}"
        )
    if not isinstance(given.function, Hashable):
        raise TypeError(
            f"{describe(given.function)} cannot be a stage's function: what is compiled for it is found by its hash, "
            f"but a {type(given.function).__name__} has none. Give the class __hash__ and __eq__, or use a function."
        )
    if not (given.inputs is None or isinstance(given.inputs, Iterable)):
        raise TypeError(
            f"inputs of {describe(given.function)} are {given.inputs!r}, expected a tuple of stages: inputs=(0, 2)"
        )
    if not (given.average is None or isinstance(given.average, RRef)):
        raise TypeError(
            f"average of {describe(given.function)} is a {type(given.average).__name__}, expected a reference to a "
            "DataParallel that the stage's worker has made: jd.remote(worker, make_data_parallel)"
        )
    if not (given.parameters is None or isinstance(given.parameters, RRef)):
        raise TypeError(
            f"the parameters of {describe(given.function)} are a {type(given.parameters).__name__}, expected a "
            "reference to them, or None: jd.remote(worker, make_parameters)"
        )
    return given


def _inputs(stages: Sequence[Stage]) -> tuple[tuple[int, ...], ...]:
    found = []
    for number, stage in enumerate(stages):
        mine = (number - 1,) if stage.inputs is None else tuple(stage.inputs)  # before the first stage: BATCH
        for source in mine:
            if source not in range(BATCH, number):
                raise ScheduleError(
                    f"stage {number} takes the result of stage {source!r}; expected earlier stages, 0 to {number - 1}, "
                    "or jd.pipeline.BATCH"
                )
        found.append(mine)
    return tuple(found)


def _refuse_unused(consumers: Sequence[tuple[int, ...]]) -> None:
    for stage, mine in enumerate(consumers[:-1]):
        if not mine:
            raise ScheduleError(
                f"no stage takes the result of stage {stage}. Name it among the inputs of a later one, or leave it out."
            )


def _ranks(stages: Sequence[Stage], schedule: Schedule, workers: Sequence[AnyWorker] | None) -> tuple[int, ...]:
    """Return the rank of each stage's worker."""
    find = current_worker().directory.find
    if workers is not None:
        if len(workers) != schedule.workers:
            raise ScheduleError(f"the schedule has {schedule.workers} workers, but workers= names {len(workers)}")
        return tuple(find(workers[index]).rank for index in schedule.placement)
    owners: dict[int, int] = {}
    for number, (stage, index) in enumerate(zip(stages, schedule.placement, strict=True)):
        if (
            stage.parameters is not None
            and owners.setdefault(index, stage.parameters.owner.rank) != stage.parameters.owner.rank
        ):
            raise ScheduleError(
                f"the schedule has stage {number} on its worker {index}, whose other stages have their parameters on "
                f"{find(owners[index])}; those of stage {number} are on {stage.parameters.owner}. Make them where "
                "the stage runs, or say where stages run: Pipeline(..., workers=)."
            )
    for index in set(schedule.placement) - set(owners):
        raise ScheduleError(
            f"the stages of the schedule's worker {index} have no parameters to run beside: Pipeline(..., workers=)"
        )
    return tuple(owners[index] for index in schedule.placement)
