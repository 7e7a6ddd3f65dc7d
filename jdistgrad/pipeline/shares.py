"""A worker's share of a pipeline's step: its actions in order, each as soon as its inputs have come."""

import dataclasses
import functools
import itertools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events
from jdistgrad.autograd.callee.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution
from jdistgrad.autograd.tape.tape import Place, next_message, serving
from jdistgrad.autograd.values.holes import has_gradient
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CallTimeoutError, WorkerLostError
from jdistgrad.pipeline.batches import split, weighted_sum
from jdistgrad.pipeline.parts import Given, Part, PlacedStage, is_reference, references_of
from jdistgrad.pipeline.stages import BATCH, StageRecording, Sum, plus, scalar_of, with_settings
from jdistgrad.pipeline.waiting import Averages, Future, StepsHere, Waits
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.functions import ServedFunction, shown_as
from jdistgrad.rpc.references import value_of
from jdistgrad.rpc.scopes import Inbox, Scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.schedules.schedule import Action, Kind

RESULT, COTANGENT = 0, 1  # kinds of pushed values


class Done(NamedTuple):
    """A worker's answer.

    Arguments:
      loss: of the whole batch, if this worker has the last stage.
      results: the last stage's auxiliary data, or without a loss its outputs, for each microbatch.
      times: for each action, by ``time.time``: when it was due, when its inputs had come, when it had sent the
        gradients of its inputs (the first half of a backward pass), and when it was done.
      recordings: the most recordings alive at once.
      contributions: to the gradients of references: the owner, the reference's id, and the contribution's number.
    """

    loss: Any
    results: list[Any]
    times: list[tuple[float, float, float, float]]
    recordings: int
    contributions: list[tuple[int, int, int]]


@shown_as("keep a part of a pipeline")
def keep(part: Part) -> Part:
    return part


@dataclasses.dataclass(frozen=True)
class Share(ServedFunction):
    """A pipeline's call to a worker. ``step`` is the step's id, the same on all workers."""

    step: int
    place: Place
    takes_references = True
    label = "a share of a pipeline's step"

    def __call__(self, part: Part | int, given: Given, waits: Waits | None = None) -> Done:
        """Run the worker's actions.

        Arguments:
          part: the part, or the id of a reference to it: a reference takes longer to send.
          given: the step's arguments that the part needs.
          waits: the step's waits, on the worker that drives it.
        """
        kept = value_of(part).result() if isinstance(part, int) else part
        scope = current_scope()
        assert scope is not None
        here = scope.content(StepsHere)
        share = RunningShare(self, kept, given, waits or Waits(current_worker(), here.closed), scope)
        here.shares.add(share)
        try:
            with serving(self.step, self.place):
                return share.run()
        finally:
            here.shares.discard(share)


@dataclasses.dataclass(eq=False)
class RunningStage:
    """A stage in a step.

    Arguments:
      parameters: their values; ``counts``: for each reference to them, how many leaves have gradients.
      sources: for each argument, the stage that it comes from, or ``BATCH``.
      wanted: for the parameters and each argument, which leaves have gradients: see ``StageRecording``.
      averaged: the future average of its gradients, if it averages.
    """

    placed: PlacedStage
    number: int
    parameters: Any
    counts: list[int]
    sources: list[int]
    wanted: tuple[bool | tuple[bool, ...], ...]
    sum: Sum
    recordings: dict[int, StageRecording] = dataclasses.field(default_factory=dict)
    averaged: Future | None = None


class RunningShare:
    """A running share."""

    def __init__(self, share: Share, part: Part, given: Given, waits: Waits, scope: Scope):
        self.step, self._place, self._part, self._given, self._waits = share.step, share.place, part, given, waits
        self._worker, self._scope, self._inbox = current_worker(), scope, scope.content(Inbox)
        self._averages: Averages | None = None
        self._stages: dict[int, RunningStage] = {}
        self._results: list[Any] = [None] * (part.microbatches if part.last else 0)
        self._times: list[tuple[float, float, float, float]] = []
        self._alive = self._most = 0  # recordings
        self._contributions: list[tuple[int, int, int]] = []
        self._due = self._ready = time.monotonic()
        self._at: Action | str = "its beginning"
        self._waits_for = ""

    def run(self) -> Done:
        """Run all actions; return the answer. An error gets a note with the action; the replicas' averages fail."""
        try:
            self._begin_averages()
            self._begin_stages()
            for action in self._part.actions:
                self._carry_out(action)
            return self._end()
        except BaseException as error:
            if not self._waits.failed_elsewhere:
                error.add_note(f"In {spelled(self._at)}, on {self._worker.info}.")
            elif isinstance(error, CallTimeoutError | WorkerLostError):  # which name no action
                error.add_note(f"{self._worker.info}: {self.doing()}.")
            if self._averages is not None:
                self._averages.abandon(self._part.stages)
            self._results.clear()
            for stage in self._stages.values():  # a user may keep the error, whose traceback holds this
                stage.recordings.clear()
                stage.sum.leaves = []
            raise

    def doing(self) -> str:
        what, since = (f"waiting for {self._waits_for}", self._due) if self._waits_for else ("computing", self._ready)
        where = f"{spelled(self._at)}: " if isinstance(self._at, Action) else ""
        return f"{where}{what} for {time.monotonic() - since:.1f} s"

    def _begin_averages(self) -> None:
        by: dict[int, DataParallel] = {}
        for number, reference in self._part.averages.items():
            self._at = f"average= of stage {number}"
            by[number] = found = reference.local_value()
            if not isinstance(found, DataParallel):
                raise TypeError(f"a reference to a {type(found).__name__}, expected one to a DataParallel")
        if by:
            self._averages = self._scope.content(StepsHere).averages_of(self.step, by)

    def _begin_stages(self) -> None:
        self._at = "the parameters"
        part, (batch, targets, sizes) = self._part, self._given
        futures = {k: [one.value_future(None) for one in references_of(part.stages[k].parameters)] for k in part.stages}
        for number, placed in part.stages.items():
            self._at = what = f"the parameters of stage {number}"
            values = [with_settings(self._until_done(future, what)) for future in futures[number]]
            tree: Any = jax.tree.structure(placed.parameters, is_leaf=is_reference)
            # Found before compiling: inside compiled code a Python number would be an array too.
            each = [tuple(map(has_gradient, jax.tree.leaves(value))) for value in values]
            trained = tuple(itertools.chain(*each)) if part.trains else False
            sources = [one for one in placed.inputs for _ in range(len(batch) if one == BATCH else 1)]
            self._stages[number] = RunningStage(
                placed,
                number,
                jax.tree.unflatten(tree, values),
                list(map(sum, each)),
                sources,
                (trained, *(one in placed.trained_inputs for one in sources)),
                Sum(part.microbatches),
            )
        self._at = "the batch"
        self._batches, self._targets = split(batch, sizes), split(targets, sizes)
        self._weights = [size / sum(sizes) for size in sizes]

    def _carry_out(self, action: Action) -> None:
        self._at, (kind, stage, microbatch) = action, action
        self._due = self._ready = half = time.monotonic()
        if kind is Kind.FORWARD:
            self._forward(self._stages[stage], microbatch)
        if kind in (Kind.INPUT, Kind.BACKWARD):
            self._pull_inputs(self._stages[stage], microbatch)
            half = time.monotonic()
        if kind in (Kind.WEIGHT, Kind.BACKWARD):
            self._pull_parameters(self._stages[stage], microbatch)
        self._times.append((self._due, self._ready, max(half, self._ready), self._waits.check()))
        if events.sink is not None:
            events.report(events.PIECE, self._worker.rank, self._worker.info.name, str(action), self._ready)

    def _end(self) -> Done:
        self._due = self._ready = time.monotonic()
        for number in self._part.averages:
            stage = self._stages.get(number)
            if stage is not None and stage.averaged is not None:
                self._at = f"the average of the gradients of stage {number}"
                self._contribute(stage, self._until_done(stage.averaged, f"the replicas of stage {number}"))
        # When the step has returned, the caller may change its batch, whose memory computations may still read.
        self._at = "computations that its actions have begun"
        for stage in self._stages.values():
            stage.sum.wait()
        self._waits.check()
        clock = time.time() - time.monotonic()  # comparable between machines
        times = [(due + clock, ready + clock, half + clock, done + clock) for due, ready, half, done in self._times]
        loss, results, last = None, self._results, self._part.last
        if last is not None and last.function.loss is not None:
            loss = weighted_sum(list(map(scalar_of, results)), self._weights)
            results = [one[1] for one in results if isinstance(one, tuple)]
        return Done(loss, results, times, self._most, self._contributions)

    def _forward(self, stage: RunningStage, microbatch: int) -> None:
        placed = stage.placed
        parts, taken = [stage.parameters], {BATCH: self._batches[microbatch]}
        for source in placed.inputs:
            if source not in taken:
                taken[source] = (self._take(RESULT, source, stage.number, microbatch),)
            parts += taken[source]
        self._ready = time.monotonic()
        targets = () if placed.consumers else self._targets[microbatch]
        recording = StageRecording(placed.function, tuple(parts), stage.wanted, targets)
        if self._part.trains:
            stage.recordings[microbatch] = recording
            self._alive += 1
            self._most = max(self._most, self._alive)
        for consumer in placed.consumers:
            self._push(RESULT, stage.number, consumer, microbatch, recording.result)
        if placed.consumers:
            recording.result = None  # of the last stage, the backward pass reads the loss
        else:
            self._results[microbatch] = recording.result

    def _pull_inputs(self, stage: RunningStage, microbatch: int) -> None:
        placed = stage.placed
        if not placed.trained:
            return
        each = [self._take(COTANGENT, one, stage.number, microbatch) for one in placed.consumers]
        recording = stage.recordings[microbatch]  # after the waits, whose errors would keep it alive
        if each:
            cotangents = functools.reduce(plus, each)
        else:
            loss = scalar_of(recording.result)
            cotangents = [np.asarray(self._weights[microbatch], jnp.result_type(loss))]
        self._ready = time.monotonic()
        found: dict[int, list[list[Any]]] = {}
        for source, each in zip(stage.sources, recording.pull_inputs(cotangents), strict=True):
            found.setdefault(source, []).append(each)
        for source in found:
            if source in placed.trained_inputs:
                self._push(COTANGENT, stage.number, source, microbatch, functools.reduce(plus, found[source]))

    def _pull_parameters(self, stage: RunningStage, microbatch: int) -> None:
        self._alive -= 1
        if not stage.sum.add(microbatch, stage.recordings.pop(microbatch).pull_parameters()):
            return
        if self._averages is not None and stage.number in self._part.averages:
            stage.averaged = self._averages.begin(stage.number, stage.sum.leaves)
        else:
            self._contribute(stage, stage.sum.leaves)

    def _contribute(self, stage: RunningStage, gradients: list[Any]) -> None:
        rest, place = iter(gradients), (*self._place, stage.number)
        for reference, count in zip(references_of(stage.placed.parameters), stage.counts, strict=True):
            contribution = Contribution(next_message(), (), [*itertools.islice(rest, count)], place)
            contribute(reference.owner.rank, REFERENCE, reference.id, contribution)
            self._contributions.append((reference.owner.rank, reference.id, contribution.number))

    def _push(self, what: int, source: int, target: int, microbatch: int, value: Any) -> None:
        self._worker.push(self._part.ranks[target], (self.step, what, source, target, microbatch), value)

    def _take(self, what: int, source: int, target: int, microbatch: int) -> Any:
        self._waits_for = f"stage {source}"
        key = self.step, what, source, target, microbatch
        found = self._inbox.take(key, self._worker.transport.look, self._waits.for_any)
        self._waits_for = ""
        return found

    def _until_done(self, future: Future, what: str) -> Any:
        self._waits_for = what
        while not future.done():
            self._waits.for_any((future,))
        self._waits_for = ""
        return future.result()


def spelled(at: Action | str) -> str:
    return at if isinstance(at, str) else f"{at}: stage {at.stage}, microbatch {at.microbatch}, {at.kind.words}"
