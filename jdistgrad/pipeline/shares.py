"""A worker's share of a pipeline's step: its actions, one after the other, each as soon as what it needs has come."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdistgrad import events
from jdistgrad.autograd.tape.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution
from jdistgrad.autograd.tape.links import next_message, serving
from jdistgrad.autograd.tape.program_order import Place
from jdistgrad.pipeline.schedule import Action, Kind
from jdistgrad.pipeline.stages import BATCH, Recording, StageFunction, added, plus, scalar_of
from jdistgrad.rpc.cached import Cached
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.functions import ServedFunction
from jdistgrad.rpc.inbox import Inbox
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.serving.failures import add_note
from jdistgrad.rpc.worker import Worker, current_worker

FORWARD, BACKWARD = 0, 1  # the ways of values
LOOK_SECONDS = 0.5  # between looks whether the world is broken, which no future tells
LONG_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "inputs", Kind.WEIGHT: "parameters"}


class Plan(NamedTuple):
    """What does not change from step to step: each worker needs all of it.

    Arguments:
      ranks: of each stage, the rank of its worker.
      inputs: of each stage, the stages whose results it takes.
      consumers: of each stage, the stages that take its result.
    """

    ranks: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]
    microbatches: int
    trains: bool


class Done(NamedTuple):
    """What a worker answers after its share.

    Arguments:
      results: of the last stage: the result for each microbatch.
      times: of each action: when it was due, when its inputs had come, and when it was done, by ``time.monotonic``.
      recordings: the most recordings that were alive at once.
    """

    results: list[Any]
    times: list[tuple[float, float, float]]
    recordings: int


@dataclasses.dataclass(frozen=True)
class Share(ServedFunction):
    """The call that a pipeline makes of a worker in a step.

    Arguments:
      step: the id of the step, the same on all workers.
      actions: the worker's own.
      functions: by stage, of the stages of this worker.
    """

    step: int
    place: Place
    plan: Cached[Plan]
    actions: Cached[tuple[tuple[str, int, int], ...]]
    functions: dict[int, StageFunction]
    takes_references = True

    @property
    def label(self) -> str:
        return "a share of a pipeline's step"

    def __call__(
        self,
        parameters: dict[int, Any],
        averages: dict[int, RRef[Any]],
        batches: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
        watched: list[concurrent.futures.Future[Any]] | None = None,
    ) -> Done:
        with serving(self.step, self.place):
            return Run(self, parameters, averages, batches, targets, weights, watched or []).finish()


class Run:
    """A share under way. ``watched``: futures that end the wait for a value with their error, if they have one."""

    def __init__(
        self,
        share: Share,
        parameters: dict[int, Any],
        averages: dict[int, RRef[Any]],
        batches: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float],
        watched: list[concurrent.futures.Future[Any]],
    ):
        self._share, self._plan, self._watched = share, share.plan.value, watched
        self._actions = [Action(Kind(kind), stage, microbatch) for kind, stage, microbatch in share.actions.value]
        self._worker, scope = current_worker(), current_scope()
        assert scope is not None
        self._inbox = scope.content(Inbox)
        self._references = parameters
        values = {stage: one.value_future(math.inf) for stage, one in parameters.items() if isinstance(one, RRef)}
        self._parameters = {stage: future.result() for stage, future in values.items()}
        self._averages = {stage: one.local_value() for stage, one in averages.items()}
        self._averaged: dict[int, concurrent.futures.Future[list[Any]]] = {}
        self._batches, self._targets, self._weights = batches, targets, weights
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._sums = {stage: Sum(self._plan.microbatches) for stage in parameters}
        self._done = Done([None] * (self._plan.microbatches if self._has_last else 0), [], 0)
        self._most, self._others_fault = 0, False
        self._due = self._ready = time.monotonic()
        self._waits_for: int | None = None
        scope.content(UnderWay).runs[share.step, id(self)] = self

    @property
    def _has_last(self) -> bool:
        return len(self._plan.ranks) - 1 in self._references

    def finish(self) -> Done:
        """Carry out all actions and return the answer."""
        steps: dict[Kind, Callable[[int, int], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._pull_inputs,
            Kind.WEIGHT: self._pull_parameters,
        }
        for action in self._actions:
            self._due = self._ready = time.monotonic()
            with self._named(action):
                steps[action.kind](action.stage, action.microbatch)
            self._done.times.append((self._due, self._ready, time.monotonic()))
            self._tell(action)
        for stage, averaged in self._averaged.items():
            self._until_done(averaged)
            self._contribute(stage, averaged.result())
        return self._done._replace(recordings=self._most)

    def doing(self) -> str:
        """Say what the share has been doing, and for how long."""
        number, source = len(self._done.times), self._waits_for
        if number == len(self._actions):
            return "done"
        what = "computing" if source is None else f"waiting for stage {source}"
        return f"{spelled(self._actions[number])}: {what} for {time.monotonic() - self._due:.1f} s"

    def _tell(self, action: Action) -> None:
        if events.sink is not None:
            events.tell(events.PIECE, self._worker.rank, self._worker.info.name, str(action), self._ready)

    @contextlib.contextmanager
    def _named(self, action: Action) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._others_fault:  # it has the name of the action that failed
                raise
            add_note(error, f"In {spelled(action)}, on {self._worker.info}.")
            raise

    # The actions.

    def _forward(self, stage: int, microbatch: int) -> None:
        sources = self._plan.inputs[stage]
        parts, wanted = [self._parameters.get(stage)], [self._plan.trains]
        for source in sources:
            given = self._batches[microbatch] if source == BATCH else (self._take(FORWARD, source, stage, microbatch),)
            parts += given
            wanted += [self._plan.trains and source != BATCH] * len(given)
        self._computing()
        last = stage == len(self._plan.ranks) - 1
        targets = self._targets[microbatch] if last else ()
        recording = Recording(self._share.functions[stage], tuple(parts), tuple(wanted), targets)
        if self._plan.trains:
            self._recordings[stage, microbatch] = recording
            self._most = max(self._most, len(self._recordings))
        if last:
            self._done.results[microbatch] = recording.result
        for consumer in self._plan.consumers[stage]:
            self._push(FORWARD, stage, consumer, microbatch, recording.result)
        recording.result = recording.result if last else None

    def _backward(self, stage: int, microbatch: int) -> None:
        self._pull_inputs(stage, microbatch)
        self._pull_parameters(stage, microbatch)

    def _pull_inputs(self, stage: int, microbatch: int) -> None:
        recording = self._recordings[stage, microbatch]
        consumers = self._plan.consumers[stage]
        if consumers:
            each = [self._take(BACKWARD, consumer, stage, microbatch) for consumer in consumers]
            cotangents = functools.reduce(plus, each)
        else:
            loss = scalar_of(recording.result)
            cotangents = [np.asarray(self._weights[microbatch], loss.dtype)]
        self._computing()
        sources = [source for source in self._plan.inputs[stage] for _ in range(self._width(source, microbatch))]
        for source, found in zip(sources, recording.pull_inputs(cotangents), strict=True):
            if source != BATCH:
                self._push(BACKWARD, stage, source, microbatch, found)

    def _pull_parameters(self, stage: int, microbatch: int) -> None:
        total = self._sums[stage]
        total.add(microbatch, self._recordings.pop((stage, microbatch)).pull_parameters())
        if total.complete and stage in self._averages:
            self._averaged[stage] = self._averaging(stage, total.leaves)
        elif total.complete:
            self._contribute(stage, total.leaves)

    def _averaging(self, stage: int, gradients: list[Any]) -> concurrent.futures.Future[list[Any]]:
        """Average on another thread, after the averages before: replicas have them in the same order."""
        promise = concurrent.futures.Future[list[Any]]()
        before = list(self._averaged.values())

        def average() -> None:
            try:
                concurrent.futures.wait(before)
                promise.set_result(self._averages[stage].average(gradients))
            except BaseException as error:
                promise.set_exception(error)

        self._worker.run(average)
        return promise

    def _contribute(self, stage: int, gradients: list[Any]) -> None:
        """Give the gradients of a stage to the owner of its parameters."""
        reference = self._references[stage]
        if isinstance(reference, RRef):
            contribution = Contribution(next_message(), (), gradients, (*self._share.place, stage))
            contribute(reference.owner.rank, REFERENCE, reference.id, contribution)

    def _width(self, source: int, microbatch: int) -> int:
        return len(self._batches[microbatch]) if source == BATCH else 1

    # Values from and to other stages.

    def _computing(self) -> None:
        self._ready = time.monotonic()

    def _push(self, way: int, source: int, target: int, microbatch: int, value: Any) -> None:
        key = self._share.step, way, source, target, microbatch
        self._worker.push(self._plan.ranks[target], key, value)

    def _take(self, way: int, source: int, target: int, microbatch: int) -> Any:
        self._waits_for = source
        found = self._inbox.take((self._share.step, way, source, target, microbatch), self._wait)
        self._waits_for = None
        return found

    def _until_done(self, future: concurrent.futures.Future[Any]) -> None:
        while not future.done():
            self._wait((future,))

    def _wait(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        wait_for_any(self._worker, (*futures, *self._watched))
        self._others_fault = True
        forget_done(self._watched)
        self._others_fault = False


def wait_for_any(worker: Worker, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Return when one of the futures is done, or after a while. Raise the error of a world that is broken."""
    worker.wait_for(futures, None)
    if not any(one.done() for one in futures):  # a single future in one process: see ``Transport.wait_for``
        concurrent.futures.wait(futures, LOOK_SECONDS, concurrent.futures.FIRST_COMPLETED)
    if worker.failure is not None:
        raise worker.failure


def forget_done(futures: list[concurrent.futures.Future[Any]]) -> None:
    """Remove the futures that are done; raise the error of the first that has one.

    No frame refers to the future then: it holds the error, whose traceback holds the frames.
    """
    for number in reversed(range(len(futures))):
        if futures[number].done():
            error = futures.pop(number).exception()
            if error is not None:
                try:
                    raise error
                finally:
                    del error


class UnderWay:
    """The shares that this worker has begun in a context."""

    def __init__(self) -> None:
        self.runs: dict[tuple[int, int], Run] = {}

    def close(self) -> None:
        self.runs.clear()

    def give_up(self, error: BaseException) -> None:
        """Do nothing: what the shares wait for fails by itself."""


def doing(step: int) -> str:
    """Say what this worker does in a step of the current context."""
    scope = current_scope()
    runs = {} if scope is None else scope.content(UnderWay).runs
    return "; ".join(run.doing() for (number, _), run in runs.items() if number == step) or "nothing yet"


def spelled(action: Action) -> str:
    return f"{action}: stage {action.stage}, microbatch {action.microbatch}, {LONG_NAMES[action.kind]}"


class Sum:
    """The sum of a stage's gradients, made in the order of the microbatches, whatever order they come in."""

    def __init__(self, microbatches: int):
        self.leaves: list[Any] = []
        self._early: dict[int, list[Any]] = {}
        self._next, self._microbatches = 0, microbatches

    @property
    def complete(self) -> bool:
        return self._next == self._microbatches

    def add(self, microbatch: int, gradients: list[Any]) -> None:
        self._early[microbatch] = gradients
        while self._next in self._early:
            more = self._early.pop(self._next)
            self.leaves = added(self.leaves, more) if self._next else more
            self._next += 1
