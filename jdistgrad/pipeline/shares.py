"""A worker's share of a pipeline's step: its actions, one after the other, each as soon as what it needs has come."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events
from jdistgrad.autograd.tape.contributions import contribute
from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution
from jdistgrad.autograd.tape.tape import Place, next_message, serving
from jdistgrad.autograd.values.holes import has_gradient
from jdistgrad.errors import CallTimeoutError, ContextError, WorkerLostError
from jdistgrad.pipeline.batches import split, weighted_sum
from jdistgrad.pipeline.plans import Part, is_reference, references_of
from jdistgrad.pipeline.stages import BATCH, Recording, Sum, plus, scalar_of, with_settings
from jdistgrad.pipeline.under_way import Averages, UnderWay, forget_done, wait_for_any
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.functions import ServedFunction
from jdistgrad.rpc.references import value_of
from jdistgrad.rpc.scopes import Inbox
from jdistgrad.rpc.worker import current_worker
from jdistgrad.schedules.schedule import Action, Kind

RESULT, COTANGENT = 0, 1  # what a pushed value is


class Keep(ServedFunction):
    """The call that leaves a part of a pipeline on its worker."""

    takes_references = True
    label = "keep a part of a pipeline"

    def __call__(self, part: Part) -> Part:
        return part


class Brought(NamedTuple):
    """What a step brings to a share. The share splits it: eight small arrays take longer to send than one.

    Arguments:
      sizes: of the microbatches.
    """

    batch: tuple[Any, ...]
    targets: tuple[Any, ...]
    sizes: Sequence[int]

    def to(self, part: Part) -> "Brought":
        takes_batch = any(BATCH in part.plan.inputs[stage] for stage in part.functions)
        return Brought(self.batch if takes_batch else (), self.targets if part.is_last else (), self.sizes)


class Done(NamedTuple):
    """What a worker answers after its share.

    Arguments:
      loss: of the whole batch, if this worker has the last stage.
      results: of the last stage: for each microbatch the auxiliary data, or without a loss the outputs.
      times: of each action: when it was due, when its inputs had come, when the gradients of its inputs had gone (of a
        backward pass: its first half), and when it was done; by ``time.time``.
      recordings: the most recordings that were alive at once.
    """

    loss: Any
    results: list[Any]
    times: list[tuple[float, float, float, float]]
    recordings: int


@dataclasses.dataclass(frozen=True)
class Share(ServedFunction):
    """The call that a pipeline makes of a worker in a step.

    Arguments:
      step: the id of the step, the same on all workers.
    """

    step: int
    place: Place
    takes_references = True
    label = "a share of a pipeline's step"

    def __call__(
        self,
        part: Part | int,
        brought: Brought,
        watched: Sequence[concurrent.futures.Future[Any]] = (),
        timeout: float = math.inf,
    ) -> Done:
        """Carry out the worker's actions.

        Arguments:
          part: the part, or the id of a reference to it that the caller holds: a reference takes longer to send.
          watched: the error of one of these futures ends the share.
          timeout: for the share of the worker that drives the step, which no timeout of a call ends.
        """
        kept = value_of(part).result() if isinstance(part, int) else part
        scope = current_scope()
        assert scope is not None
        under_way = scope.content(UnderWay)
        run = Run(self, kept, brought, watched, timeout)
        under_way.runs.add(run)
        try:
            with serving(self.step, self.place):
                return run.run()
        finally:
            under_way.runs.discard(run)
            under_way.done.add(self.step)


class Run:
    """A share under way."""

    def __init__(
        self,
        share: Share,
        part: Part,
        brought: Brought,
        watched: Sequence[concurrent.futures.Future[Any]],
        timeout: float,
    ):
        self.step, self._place, self._part, self._plan = share.step, share.place, part, part.plan
        self._worker, scope = current_worker(), current_scope()
        assert scope is not None
        self._watched, under_way = list(watched), scope.content(UnderWay)
        self._closed, averages = under_way.closed, part.averages and part.plan.trains
        self._averages = under_way.averages_of(self.step) if averages else Averages(self._closed)
        self._failed_elsewhere = False  # whether the error that was raised is that of a watched future
        self._timeout, self._begun = timeout, time.monotonic()
        self._inbox = scope.content(Inbox)
        self._parameters: dict[int, Any] = {}
        self._trainable: dict[int, tuple[bool, ...]] = {}  # which leaves of the parameters have gradients
        self._gradients: dict[int, list[int]] = {}  # how many of each reference
        self._averaging: dict[int, concurrent.futures.Future[list[Any]]] = {}  # averages, by stage
        self._brought = brought
        self._recordings: dict[tuple[int, int], Recording] = {}
        self._sums = {stage: Sum(self._plan.microbatches) for stage in part.functions}
        self._results: list[Any] = [None] * (self._plan.microbatches if part.is_last else 0)
        self._times: list[tuple[float, float, float, float]] = []
        self._most = 0
        self._due = self._ready = self._half = time.monotonic()
        self._action: Action | None = None
        self._waits_for = ""

    def run(self) -> Done:
        """Carry out all actions and return the answer. If that fails, the stages' replicas are told."""
        try:
            return self._carry_out()
        except BaseException:
            self._averages.abandon(self._part.averages)
            self._recordings, self._sums, self._results = {}, {}, []  # a user may keep the error, which holds this
            raise

    def _carry_out(self) -> Done:
        order = [stage for stage in self._plan.averaging if self._plan.ranks[stage] == self._worker.rank]
        for stage, reference in self._part.averages.items() if self._plan.trains else ():
            with self._named(f"average= of stage {stage}"):
                self._averages.find(self._worker, order, stage, reference)
        self._fetch_parameters()
        with self._named("the batch"):
            batch, targets, sizes = self._brought
            self._batches, self._targets = split(batch, sizes), split(targets, sizes)
            self._weights = [size / sum(sizes) for size in sizes]
        self._carry_out_actions()
        self._due = self._ready = time.monotonic()
        for stage, averaged in self._averaging.items():
            with self._named(f"the average of the gradients of stage {stage}"):
                self._until_done(averaged, f"the replicas of stage {stage}")
                self._contribute(stage, averaged.result())
        # The caller may change its batch when the step has returned, and this worker may compute on that very memory.
        with self._named("computations that its actions have begun"):
            for total in self._sums.values():
                total.wait()
            self._check_time()
            clock = time.time() - time.monotonic()  # other machines know only the time of day
            times = [(due + clock, ready + clock, half + clock, done + clock) for due, ready, half, done in self._times]
            loss, results = None, self._results
            if self._part.is_last and self._part.functions[len(self._plan.ranks) - 1].loss is not None:
                loss = weighted_sum(list(map(scalar_of, results)), self._weights)
                results = [one[1] for one in results if isinstance(one, tuple)]
            return Done(loss, results, times, self._most)

    def _carry_out_actions(self) -> None:
        try:
            for action in self._part.actions:
                self._action = action
                self._due = self._ready = time.monotonic()
                self._check()
                kind, stage, microbatch = action
                if kind is Kind.FORWARD:
                    self._forward(stage, microbatch)
                elif kind is not Kind.WEIGHT:
                    self._pull_inputs(stage, microbatch)
                self._half = time.monotonic()
                if kind in (Kind.BACKWARD, Kind.WEIGHT):
                    self._pull_parameters(stage, microbatch)
                done = self._check_time()
                self._times.append((self._due, self._ready, max(self._half, self._ready), done))
                if events.sink is not None:
                    events.tell(events.PIECE, self._worker.rank, self._worker.info.name, str(action), self._ready)
        except BaseException as error:
            self._name(error, spelled(action))
            raise
        self._action = None

    def doing(self) -> str:
        what, since = (f"waiting for {self._waits_for}", self._due) if self._waits_for else ("computing", self._ready)
        where = "" if self._action is None else f"{spelled(self._action)}: "
        return f"{where}{what} for {time.monotonic() - since:.1f} s"

    def _check_time(self) -> float:
        """Return the time. Raise if the step has taken too long."""
        now = time.monotonic()
        if now - self._begun > self._timeout:
            raise CallTimeoutError(
                f"a step of a pipeline took longer than {self._timeout:g} s. Give the pipeline (timeout=) or the world "
                "(init(timeout=)) more time if it may take that long.",
                seconds=self._timeout,
            )
        return now

    def _fetch_parameters(self) -> None:
        futures = {
            stage: [one.value_future(None) for one in references_of(given)]
            for stage, given in self._part.parameters.items()
        }
        for stage, mine in futures.items():
            with self._named(f"the parameters of stage {stage}"):
                for future in mine:
                    self._until_done(future, f"the parameters of stage {stage}")
                values = [with_settings(future.result()) for future in mine]
                tree: Any = jax.tree.structure(self._part.parameters[stage], is_leaf=is_reference)
                self._parameters[stage] = jax.tree.unflatten(tree, values)
                # Found before compiling: inside compiled code a Python number would be an array too.
                each = [tuple(map(has_gradient, jax.tree.leaves(value))) for value in values]
                self._trainable[stage] = tuple(itertools.chain(*each))
                self._gradients[stage] = list(map(sum, each))

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._name(error, what)
            raise

    def _name(self, error: BaseException, what: str) -> None:
        if not self._failed_elsewhere:
            error.add_note(f"In {what}, on {self._worker.info}.")
        elif isinstance(error, CallTimeoutError | WorkerLostError):  # which name no action
            error.add_note(f"{self._worker.info}: {self.doing()}.")

    # The actions.

    def _forward(self, stage: int, microbatch: int) -> None:
        sources = self._plan.inputs[stage]
        taken = {one: self._take(RESULT, one, stage, microbatch) for one in dict.fromkeys(sources) if one != BATCH}
        parts = [self._parameters.get(stage)]
        wanted: list[bool | tuple[bool, ...]] = [self._trainable.get(stage, ()) if self._plan.trains else False]
        for source in sources:
            given = self._batches[microbatch] if source == BATCH else (taken[source],)
            parts += given
            wanted += [self._plan.trains and self._is_trained(source)] * len(given)
        self._ready = time.monotonic()
        last = stage == len(self._plan.ranks) - 1
        targets = self._targets[microbatch] if last else ()
        recording = Recording(self._part.functions[stage], tuple(parts), tuple(wanted), targets)
        if self._plan.trains:
            self._recordings[stage, microbatch] = recording
            self._most = max(self._most, len(self._recordings))
        if last:
            self._results[microbatch] = recording.result
        for consumer in self._plan.consumers[stage]:
            self._push(RESULT, stage, consumer, microbatch, recording.result)
        if not last:
            recording.result = None  # of the last stage, the backward pass reads the loss

    def _pull_inputs(self, stage: int, microbatch: int) -> None:
        if not self._is_trained(stage):
            return
        consumers = self._plan.consumers[stage]
        each = [self._take(COTANGENT, consumer, stage, microbatch) for consumer in consumers]
        recording = self._recordings[stage, microbatch]  # not before: an error that ends the wait would keep it
        if consumers:
            cotangents = functools.reduce(plus, each)
        else:
            loss = scalar_of(recording.result)
            cotangents = [np.asarray(self._weights[microbatch], jnp.result_type(loss))]
        self._ready = time.monotonic()
        sources = [
            source
            for source in self._plan.inputs[stage]
            for _ in range(len(self._batches[microbatch]) if source == BATCH else 1)
        ]
        found: dict[int, list[list[Any]]] = {}
        for source, each in zip(sources, recording.pull_inputs(cotangents), strict=True):
            found.setdefault(source, []).append(each)
        for source in filter(self._is_trained, found):
            self._push(COTANGENT, stage, source, microbatch, functools.reduce(plus, found[source]))

    def _pull_parameters(self, stage: int, microbatch: int) -> None:
        total = self._sums[stage]
        if not total.add(microbatch, self._recordings.pop((stage, microbatch)).pull_parameters()):
            return
        if stage in self._part.averages:
            self._averaging[stage] = self._averages.begin(stage, total.leaves)
        else:
            self._contribute(stage, total.leaves)

    def _contribute(self, stage: int, gradients: list[Any]) -> None:
        rest = iter(gradients)
        references = references_of(self._part.parameters[stage])
        for reference, count in zip(references, self._gradients[stage], strict=True):
            mine = list(itertools.islice(rest, count))
            contribute(
                reference.owner.rank,
                REFERENCE,
                reference.id,
                Contribution(next_message(), (), mine, (*self._place, stage)),
            )

    def _is_trained(self, source: int) -> bool:
        """Return whether what a stage takes from a source depends on parameters."""
        return source != BATCH and self._plan.trained[source]

    # Values from and to other stages.

    def _push(self, what: int, source: int, target: int, microbatch: int, value: Any) -> None:
        key = self.step, what, source, target, microbatch
        self._worker.push(self._plan.ranks[target], key, value)

    def _take(self, what: int, source: int, target: int, microbatch: int) -> Any:
        self._waits_for = f"stage {source}"
        key = self.step, what, source, target, microbatch
        found = self._inbox.take(key, self._worker.transport.look, self._wait_for_any)
        self._waits_for = ""
        return found

    def _until_done(self, future: concurrent.futures.Future[Any], what: str) -> None:
        self._waits_for = what
        while not future.done():
            self._wait_for_any((future, self._closed))
        self._waits_for = ""

    def _wait_for_any(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Return when one of the futures is done, or after a while. Raise if the share is to end."""
        wait_for_any(self._worker, (*futures, *self._watched))
        self._check()

    def _check(self) -> None:
        """Raise if the step has failed elsewhere: a share may have all that its actions need, and much to do."""
        if any(one.done() for one in self._watched):
            try:
                forget_done(self._watched)
            except BaseException:
                self._failed_elsewhere = True
                raise
        if self._closed.done():
            raise ContextError("the context was closed while a step of a pipeline was under way")


def spelled(action: Action) -> str:
    return f"{action}: stage {action.stage}, microbatch {action.microbatch}, {action.kind.words}"
