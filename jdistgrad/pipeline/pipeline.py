"""Pipelines: a model cut into stages on several workers, trained with several microbatches in flight."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.contexts import opened_context
from jdistgrad.errors import ContextError, DifferentiationError
from jdistgrad.pipeline.batches import in_jax, joined, sizes_of
from jdistgrad.pipeline.plans import as_stage
from jdistgrad.pipeline.program import Program
from jdistgrad.pipeline.report import Report
from jdistgrad.pipeline.shares import Brought
from jdistgrad.rpc.caller import AnyWorker, checked_timeout
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.functions import describe
from jdistgrad.schedules.schedule import Kind, Schedule


class Pipeline:
    """A model in stages on several workers, which push results to each other while several microbatches are in flight.

    The gradients of a step gather in the context on the owners of the parameters, added in the order of the
    microbatches: every schedule and placement gives the same bits.

    Arguments:
      stages: in the model's order: a ``Stage``, a pair of a function and a reference to its parameters (or a tree of
        references), or a ``RemoteFunction`` or ``RemoteModule`` without state.
      schedule: who does what in which order: ``jd.pipeline.one_f_one_b(workers, microbatches)`` and others.
      loss: ``loss(outputs, targets)`` of a microbatch: its mean, or a pair of it and auxiliary data. Without it there
        is only ``apply``.
      workers: the workers of the schedule, by name or rank. Default: each stage runs where its parameters are.
      timeout: seconds that a step may take; default the world's.

    Raises:
      ScheduleError: the schedule does not fit the stages, or would never end.

    Example:
      >>> pipeline = jd.Pipeline(stages, jd.pipeline.one_f_one_b(4, 8), loss=cross_entropy)
      >>> with jd.context() as ctx:
      ...     loss = pipeline.step(x, targets=y)
      ...     optimizer.step(ctx)
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
        if timeout is not None:
            checked_timeout(timeout)
        self.stages, self.schedule, self.loss = list(map(as_stage, stages)), schedule, loss
        self._program, self._workers, self._timeout = Program(self.stages, schedule, loss, workers), workers, timeout
        self._report: Report | None = None

    @functools.cached_property
    def _without_loss(self) -> Program:
        forward = tuple(tuple(one for one in row if one.kind is Kind.FORWARD) for row in self.schedule.actions)
        return Program(self.stages, Schedule(self.schedule.placement, forward), None, self._workers)

    def step(self, *batch: Any, targets: Any = None) -> Any:
        """Run a step; return the loss, or the loss and a list of the microbatches' auxiliary data.

        Arrays are split into microbatches along their first axis, except what ``jd.pipeline.whole`` marks. The loss is
        the mean over all rows: a microbatch with fewer rows weighs less. If a step fails, its context is closed, so
        that no optimizer uses half of its gradients.

        Arguments:
          batch: what the first stage takes after its parameters.
          targets: what the loss takes after the outputs.

        Raises:
          ContextError: the step is not inside ``with jd.context()``.
          DifferentiationError: the step is differentiated, or traced by ``jax.jit``.
          TypeError: something in the batch is a reference, or no array.
          ValueError: the batch cannot be split.
          Exception: what a stage has raised, with the stage, the microbatch, the action and the worker.
        """
        if self.loss is None:
            raise TypeError("this pipeline has no loss to take a step of: Pipeline(..., loss=), or apply(*batch)")
        _refuse_traced("step")
        if self.schedule.trains and current_scope() is None:
            raise ContextError(
                "a pipeline's step gathers its gradients in a context: put the step, and the optimizer's step, inside "
                "`with jd.context() as ctx:`"
            )
        if targets is None:
            with contextlib.suppress(ValueError):  # of a loss that does not say what it takes
                try:
                    inspect.signature(self.loss).bind(None)
                except TypeError as error:
                    raise TypeError(f"{describe(self.loss)} takes targets: step(..., targets=), {error}") from None
        with opened_context() if current_scope() is None else contextlib.nullcontext():
            loss, auxiliary = self._run(self._program, batch, () if targets is None else (targets,))
        return in_jax(loss, auxiliary)

    def apply(self, *batch: Any) -> Any:
        """Run the stages forward, without the loss; return the last stage's outputs, joined along their first axis.

        This has a context of its own: if it fails, gradients of steps before it are not lost.
        """
        _refuse_traced("apply")
        with opened_context():
            _, outputs = self._run(self._without_loss, batch, ())
        return joined(outputs)

    def report(self) -> Report:
        """Return what the last step took, beside its forecast."""
        if self._report is None:
            raise ValueError("there is nothing to report: the pipeline has not finished a step")
        return self._report

    def __repr__(self) -> str:
        names = ", ".join(describe(one.function) for one in self.stages)
        return f"<Pipeline of {names} on ranks {list(self._program.plan.ranks)}, {self.schedule!r}>"

    def __reduce__(self) -> Any:
        make = functools.partial(type(self), loss=self.loss, workers=self._workers, timeout=self._timeout)
        return make, (self.stages, self.schedule)

    def _run(self, program: Program, batch: tuple[Any, ...], targets: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Run a program; return the loss, and the last stage's other results for each microbatch."""
        sizes = sizes_of(batch, targets, program.plan.microbatches)
        done, self._report = program.run(Brought(batch, targets, sizes), self._timeout)
        return done.loss, done.results


def _refuse_traced(what: str) -> None:
    if not trace_state_clean():
        raise DifferentiationError(
            f"a pipeline's {what} cannot be differentiated or traced: it runs its own backward pass, for first "
            "derivatives. Call it from Python; for derivatives of derivatives, or inside jd.jit, call the stages by "
            "jd.rpc_sync under jd.value_and_grad."
        )
