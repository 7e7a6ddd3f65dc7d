"""What a pipeline sends to its workers in each step, prepared once, and the wait for their answers."""

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdistgrad.autograd.tape.tape import next_message, next_place
from jdistgrad.errors import CallTimeoutError, DistgradError, ScheduleError, WorkerLostError
from jdistgrad.pipeline.plans import Part, Plan, averaging_of, consumers_of, ranks_of
from jdistgrad.pipeline.report import Report
from jdistgrad.pipeline.shares import Brought, Done, Keep, Share
from jdistgrad.pipeline.stages import BATCH, Stage, StageFunction
from jdistgrad.pipeline.under_way import doing, forget_done, tell_replicas, wait_for_any
from jdistgrad.rpc.caller import AnyWorker, checked_timeout
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.rref import RRef, remote
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.schedules.playing import check
from jdistgrad.schedules.schedule import Schedule

ANSWER_SECONDS = 0.5
NOTHING = Done(None, [], [], 0)  # of a worker without actions

Future = concurrent.futures.Future[Any]


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
        # What each stage takes, in the order of its arguments: results of other stages, or the batch.
        inputs = tuple((k - 1,) if one.inputs is None else tuple(one.inputs) for k, one in enumerate(stages))
        self.schedule = schedule
        self._between = {k: tuple(one for one in mine if one != BATCH) for k, mine in enumerate(inputs)}
        check(schedule, self._between)
        ranks = ranks_of(stages, schedule, workers)
        averaging, consumers = averaging_of(stages), consumers_of(inputs)
        trained: list[bool] = []
        for stage, mine in zip(stages, inputs, strict=True):
            trained.append(stage.parameters is not None or any(trained[one] for one in mine if one != BATCH))
        self.plan = Plan(ranks, inputs, consumers, tuple(trained), schedule.microbatches, schedule.trains, averaging)
        functions = [StageFunction(one.function, one.remat) for one in stages]
        functions[-1] = StageFunction(stages[-1].function, stages[-1].remat, loss)
        self._kept: dict[tuple[str, int], dict[int, RRef[Any]]] = {}  # by the world and rank of who drives the steps
        self._parts: dict[int, Part] = {}
        self._ranks = dict(zip(schedule.placement, ranks, strict=True))  # of the schedule's workers
        for index, row in enumerate(schedule.actions):
            here = [stage for stage, place in enumerate(schedule.placement) if place == index]
            if row:
                self._parts[index] = Part(
                    self.plan,
                    row,
                    {stage: functions[stage] for stage in here},
                    {stage: stages[stage].parameters for stage in here},
                    {stage: stages[stage].average for stage in here if stages[stage].average is not None},
                )

    @property
    def _own(self) -> int | None:
        """The index of a part that this worker carries out itself while it waits, if it has one."""
        here = current_worker().rank
        return next((index for index in self._parts if self._ranks[index] == here), None)

    def _kept_parts(self) -> dict[int, RRef[Any]]:
        """Return the parts on other workers: functions that came with each step would be compiled in each step.

        Those that could not come are sent again: a worker may have had a stage's function not yet.
        """
        own, kept = self._own, self._kept.setdefault((current_worker().world, current_worker().rank), {})
        failed = {index for index, part in kept.items() if part.creation().done() and part.creation().exception()}
        missing = [index for index in self._parts if index != own and (index not in kept or index in failed)]
        if missing:
            with within(None):  # they outlive the context of the step that needs them first
                kept |= {
                    index: remote(self._ranks[index], Keep(), (self._parts[index],), {}, None) for index in missing
                }
        return kept.copy()

    def run(self, brought: Brought, timeout: float | None) -> tuple[Done, Report]:
        """Run the program in the current context; return what the last stage's worker has answered, and a report.

        If a worker fails, the context is closed: that ends the waits of all others.
        """
        worker, scope, start = current_worker(), current_scope(), time.monotonic()
        assert scope is not None
        limit = worker.timeout if timeout is None else checked_timeout(timeout)
        own, share, futures = self._own, Share(next_message(), next_place()), dict[int, Future]()
        done, arguments, waiting = dict[int, Done](), tuple[Any, ...](), list[Future]()
        try:
            kept = self._kept_parts()
            for index, part in kept.items():
                arguments = part.id, brought.to(self._parts[index])
                futures[index] = worker.rpc_async(self._ranks[index], share, arguments, {}, limit)
            if own is not None:
                mine = self._parts[own]
                done[own] = share(mine, brought.to(mine), list(futures.values()), limit)
            waiting = list(futures.values())
            while waiting:
                wait_for_any(worker, waiting)
                forget_done(waiting)
            done |= {index: one.result() for index, one in futures.items()}
        except BaseException as error:
            try:
                if isinstance(error, CallTimeoutError | WorkerLostError):
                    self._add_who_does_what(error, worker, share.step, futures)
                self._tell_replicas(worker, share.step)
            finally:
                worker.releasing.close_scope(scope.id)
                futures.clear()  # they hold the error, whose traceback holds this frame
                waiting.clear()
                arguments = ()
            raise
        seconds = time.monotonic() - start
        ordered = [done.get(index, NOTHING) for index in range(self.schedule.workers)]
        return done[self.schedule.placement[-1]], Report(self.schedule, self._between, ordered, seconds)

    def _add_who_does_what(
        self, error: BaseException, worker: Worker, step: int, futures: Mapping[int, Future]
    ) -> None:
        """Add what each worker has been doing: the error itself names no action, and perhaps not who is to blame."""
        asked = dict[int, Future]()
        for index in futures:
            with contextlib.suppress(WorkerLostError):
                asked[index] = worker.rpc_async(self._ranks[index], doing, (step,), {}, ANSWER_SECONDS)
        for index in futures:
            failed = asked[index].exception() if index in asked else WorkerLostError("")
            if isinstance(failed, WorkerLostError):
                found = f"lost, with stages {sorted(self._parts[index].functions)}"
            else:
                found = asked[index].result() if failed is None else f"no answer within {ANSWER_SECONDS:g} s"
            error.add_note(f"{worker.directory.workers[self._ranks[index]]}: {found}.")

    def _tell_replicas(self, worker: Worker, step: int) -> None:
        """Let the next step of replicas fail that have averaged with this one, which has failed since."""
        asked = list[Future]()
        for index in [index for index, part in self._parts.items() if part.averages]:
            with contextlib.suppress(DistgradError):  # of them, the step has its own error
                asked.append(worker.rpc_async(self._ranks[index], tell_replicas, (step,), {}, ANSWER_SECONDS))
        concurrent.futures.wait(asked)
