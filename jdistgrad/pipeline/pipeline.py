"""Pipelines: a model cut into stages on several workers, trained with several microbatches in flight."""

import collections
import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.contexts import opened_context, some_context
from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.autograd.tape.ledger import mark
from jdistgrad.autograd.tape.tape import next_message, next_place
from jdistgrad.errors import CallTimeoutError, ContextError, DifferentiationError, DistgradError, WorkerLostError
from jdistgrad.leaves import as_jax_array
from jdistgrad.pipeline.batches import joined, sizes_of
from jdistgrad.pipeline.parts import Part, as_stage, parts_of, references_of
from jdistgrad.pipeline.report import Report
from jdistgrad.pipeline.shares import Done, Share, keep
from jdistgrad.pipeline.waiting import Future, StepsHere, Waits, fail_step
from jdistgrad.rpc.caller import AnyWorker, checked_timeout
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.handles import NO_MARKS, GradientHandle
from jdistgrad.rpc.rref import RRef, remote
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.schedules.schedule import Kind, Schedule

ANSWER_SECONDS = 0.5
NOTHING = Done(None, [], [], 0, [])  # from a worker without actions


class Pipeline:
    """A model in stages on several workers, which push results to each other while several microbatches are in flight.

    A step's gradients add up in the context on the owners of the parameters, in the order of the microbatches: every
    schedule and placement gives the same bits.

    Arguments:
      stages: in the model's order: a ``Stage``, a pair of a function and a reference to its parameters (or a tree of
        references), or a ``RemoteFunction`` or ``RemoteModule`` without state.
      schedule: the order of each worker's actions: ``jd.pipeline.one_f_one_b(workers, microbatches)`` and others.
      loss: ``loss(outputs, targets)`` of a microbatch: its mean, or a pair of it and auxiliary data. Without it there
        is only ``apply``.
      workers: the workers of the schedule, by name or rank. Default: each stage runs where its parameters are.
      timeout: seconds that a step may take; default the world's.

    Raises:
      ScheduleError: the schedule does not fit the stages, or would never end.

    Example:
      >>> pipeline = jd.Pipeline(stages, jd.pipeline.one_f_one_b(4, 8), loss=cross_entropy)
      >>> optimizer = jd.DistributedOptimizer(optax.adam(1e-3), pipeline.parameters)
      >>> loss, gradients = pipeline.value_and_grad(x, targets=y)
      >>> optimizer.step(gradients)
    """

    def __init__(
        self,
        stages: Sequence[Any],
        schedule: Schedule,
        *,
        loss: Callable[..., Any] | None = None,
        workers: Sequence[AnyWorker] | None = None,
        timeout: float | None = None,
    ):
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"{schedule!r:.60} is no schedule. Make one by jd.pipeline.one_f_one_b(workers, microbatches) or "
                "another function, or from text by jd.pipeline.Schedule.parse(text)."
            )
        if not (loss is None or callable(loss)):
            raise TypeError(f"loss= is {loss!r:.60}, expected a function of the last stage's outputs and the targets")
        self.stages, self.schedule, self.loss = list(map(as_stage, stages)), schedule, loss
        self._workers, self._timeout = workers, None if timeout is None else checked_timeout(timeout)
        self._parts, self._ranks, self._between = parts_of(self.stages, schedule, loss, workers)
        self._kept: dict[tuple[str, int], dict[int, RRef[Part]]] = {}  # by the world and rank of the driver
        self._report: Report | None = None

    @functools.cached_property
    def _without_loss(self) -> "Pipeline":
        forward = tuple(tuple(one for one in row if one.kind is Kind.FORWARD) for row in self.schedule.actions)
        schedule = Schedule(self.schedule.placement, forward)
        return Pipeline(self.stages, schedule, workers=self._workers, timeout=self._timeout)

    def step(self, *batch: Any, targets: Any = None) -> Any:
        """Run a step in a context; return the loss, or the loss and a list of the microbatches' auxiliary data.

        Arrays are split into microbatches along their first axis, except what ``jd.pipeline.whole`` marks. The loss is
        the mean over all rows: a microbatch with fewer rows weighs less. If a step fails, its context is closed, so
        that no optimizer uses incomplete gradients.

        Arguments:
          batch: the first stage's arguments after its parameters.
          targets: the loss's second argument.

        Raises:
          ContextError: the step is not inside ``with jd.context()``.
          DifferentiationError: the step is differentiated, or traced by ``jax.jit``.
          TypeError: something in the batch is a reference, or no array.
          ValueError: the batch cannot be split.
          Exception: a stage's error, with the stage, the microbatch, the action and the worker.
        """
        return self._stepped(batch, targets)[0]

    def value_and_grad(self, *batch: Any, targets: Any = None) -> tuple[Any, list[RemoteGradient]]:
        """Run a step; return what ``step`` returns, and the gradients of ``parameters``, which stay on their owners.

        Outside any context, it opens a context of its own, which closes when the last of the gradients is gone.
        """
        with some_context() as lease:
            value, contributions = self._stepped(batch, targets)
            marks = collections.defaultdict[tuple[int, int], Any](NO_MARKS.copy)
            for owner, identifier, number in contributions:
                marks[owner, identifier] += mark(number)
            handles = [GradientHandle(marks[one.owner.rank, one.id]) for one in self.parameters]
            each = zip(self.parameters, handles, strict=True)
            return value, [RemoteGradient(one, handle, current_scope(), lease) for one, handle in each]

    def _stepped(self, batch: tuple[Any, ...], targets: Any) -> tuple[Any, list[tuple[int, int, int]]]:
        """Run a step; return its result, and the contributions to gradients."""
        if self.loss is None:
            raise TypeError("this pipeline has no loss. Give one: Pipeline(..., loss=), or call apply(*batch)")
        if self.schedule.trains and current_scope() is None and trace_state_clean():
            raise ContextError(
                "a pipeline's step adds its gradients to a context. Put the step, and the optimizer's step, inside "
                "`with jd.context() as ctx:`"
            )
        if targets is None:
            with contextlib.suppress(ValueError):  # a loss without a signature
                try:
                    inspect.signature(self.loss).bind(None)
                except TypeError as error:
                    raise TypeError(f"{describe(self.loss)} takes targets: step(..., targets=), {error}") from None
        with opened_context() if current_scope() is None else contextlib.nullcontext():
            done = self._run(batch, () if targets is None else (targets,))
        given = (done.loss, done.results) if done.results else done.loss
        value = jax.tree.map(lambda leaf: as_jax_array(leaf) if isinstance(leaf, np.ndarray) else leaf, given)
        return value, done.contributions

    @property
    def parameters(self) -> list[RRef[Any]]:
        """Return the references to the stages' parameters, in the order of the stages, each once."""
        return list(dict.fromkeys(one for stage in self.stages for one in references_of(stage.parameters)))

    def apply(self, *batch: Any) -> Any:
        """Run the stages forward, without the loss; return the last stage's outputs, joined along their first axis.

        It has its own context: if it fails, the gradients of steps before it are kept.
        """
        with opened_context():
            outputs = self._without_loss._run(batch, ()).results
        self._report = self._without_loss._report
        return joined(outputs)

    def report(self) -> Report:
        """Return the times of the last step, next to its forecast."""
        if self._report is None:
            raise ValueError("there is nothing to report: the pipeline has not finished a step")
        return self._report

    def __repr__(self) -> str:
        names = ", ".join(describe(one.function) for one in self.stages)
        ranks = [self._ranks[index] for index in self.schedule.placement]
        return f"<Pipeline of {names} on ranks {ranks}, {self.schedule!r}>"

    def __reduce__(self) -> Any:
        make = functools.partial(type(self), loss=self.loss, workers=self._workers, timeout=self._timeout)
        return make, (self.stages, self.schedule)

    def _run(self, batch: tuple[Any, ...], targets: tuple[Any, ...]) -> Done:
        """Take a step in the current context; return the answer of the last stage's worker.

        If a worker fails, the context is closed: that ends the waits of all others.
        """
        if not trace_state_clean():
            raise DifferentiationError(
                "a pipeline's step and apply cannot be differentiated or traced: it runs its own backward pass, for "
                "first derivatives. Call it from Python; for derivatives of derivatives, or inside jd.jit, call the "
                "stages by jd.rpc_sync under jd.value_and_grad."
            )
        given = batch, targets, sizes_of(batch, targets, self.schedule.microbatches)
        self._report = None
        worker, scope, start = current_worker(), current_scope(), time.monotonic()
        assert scope is not None
        limit = worker.timeout if self._timeout is None else self._timeout
        share, futures, done = Share(next_message(), next_place()), dict[int, Future](), dict[int, Done]()
        waits = Waits(worker, scope.content(StepsHere).closed, limit)
        try:
            own = next((index for index in self._parts if self._ranks[index] == worker.rank), None)
            for index, kept in self._kept_parts(own).items():
                mine = self._parts[index].needed(*given)
                futures[index] = worker.rpc_async(self._ranks[index], share, (kept.id, mine), {}, limit)
            waits.answers = list(futures.values())
            if own is not None:
                done[own] = share(self._parts[own], self._parts[own].needed(*given), waits)
            while waits.answers:
                waits.for_any(())
            done |= {index: one.result() for index, one in futures.items()}
        except BaseException as error:
            try:
                self._fail(error, worker, share.step, futures)
            finally:
                worker.releasing.close_scope(scope.id)
                for held in (futures, waits.answers):  # they hold the error, whose traceback holds this frame
                    held.clear()
            raise
        seconds = time.monotonic() - start
        ordered = [done.get(index, NOTHING) for index in range(self.schedule.workers)]
        self._report = Report(self.schedule, self._between, ordered, seconds)
        contributions = [one for there in ordered for one in there.contributions]
        return done[self.schedule.placement[-1]]._replace(contributions=contributions)

    def _kept_parts(self, own: int | None) -> dict[int, RRef[Part]]:
        """Return the parts on other workers: functions sent with each step would be compiled in each step.

        Parts that could not be unpickled are sent again: a worker may not have defined a stage's function yet.
        """
        kept = self._kept.setdefault((current_worker().world, current_worker().rank), {})
        failed = {index for index, part in kept.items() if part.creation().done() and part.creation().exception()}
        missing = [index for index in self._parts if index != own and (index not in kept or index in failed)]
        with within(None):  # they outlive the step's context
            kept |= {index: remote(self._ranks[index], keep, (self._parts[index],), {}, None) for index in missing}
        return kept.copy()

    def _fail(self, error: BaseException, worker: Worker, step: int, futures: Mapping[int, Future]) -> None:
        """Fail the averages of a step. Add what each worker does to the error of a wait, which names no action."""
        is_wait, asked = isinstance(error, CallTimeoutError | WorkerLostError), dict[int, Future]()
        for index in [index for index, part in self._parts.items() if part.averages or (is_wait and index in futures)]:
            with contextlib.suppress(DistgradError):  # the step has an error of its own
                asked[index] = worker.rpc_async(self._ranks[index], fail_step, (step,), {}, ANSWER_SECONDS)
        failed = {index: answer.exception() for index, answer in asked.items()}
        for index in futures if is_wait else ():
            if isinstance(failed.get(index, WorkerLostError("")), WorkerLostError):
                found = f"lost, with stages {sorted(self._parts[index].stages)}"
            else:
                found = f"no answer within {ANSWER_SECONDS:g} s" if failed[index] else asked[index].result()
            error.add_note(f"{worker.directory.workers[self._ranks[index]]}: {found}.")
