"""The averages of stages' gradients with the stages' replicas in other pipelines, while other stages compute."""

import concurrent.futures
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.worker import Worker

Told = concurrent.futures.Future[None]

# Replicas must hear of a failed step before the next average begins here: they would pair the two. Until then whoever
# tells them holds the future; afterwards nobody needs it, nor what has waited for it, which holds the DataParallel.
_telling: "weakref.WeakKeyDictionary[DataParallel, weakref.ref[Told]]" = weakref.WeakKeyDictionary()


class Turns:
    """Whose turn it is to average on this worker, in the steps of a context: a worker may carry out several shares.

    Attributes:
      closed: whether the context has been closed: a stage whose turn has not come averages no more.
      giving_up: held while a stage's step is given up.
    """

    def __init__(self) -> None:
        self._over: dict[tuple[int, int], concurrent.futures.Future[None]] = {}
        self._averaged: dict[int, list[DataParallel]] = {}  # by step
        self._failed: set[int] = set()
        self._lock, self.giving_up = threading.Lock(), threading.Lock()
        self.closed = False

    def over(self, step: int, stage: int) -> concurrent.futures.Future[None]:
        """Return a future that is done when the stage has averaged in this step, or never will."""
        with self._lock:
            found = self._over.setdefault((step, stage), concurrent.futures.Future())
            if self.closed and not found.done():
                found.set_result(None)
            return found

    def end(self, step: int, stage: int) -> None:
        found = self.over(step, stage)
        with self._lock:
            if not found.done():
                found.set_result(None)

    def averaged(self, step: int, by: DataParallel) -> None:
        """Note that a stage has averaged in a step, which may have failed meanwhile."""
        with self._lock:
            self._averaged.setdefault(step, []).append(by)
            has_failed = step in self._failed
        if has_failed:
            self.fail(step)

    def fail(self, step: int) -> None:
        """Let the replicas' next step fail: they have averaged with a step that has failed since, and do not know."""
        with self._lock:
            self._failed.add(step)
            averaged = self._averaged.pop(step, [])
        for one in averaged:
            one.abandon()

    def close(self) -> None:
        with self._lock:
            self.closed = True
            left = list(self._over)
        for step, stage in left:
            self.end(step, stage)

    def give_up(self, error: BaseException) -> None:
        """Do nothing: the shares fail by themselves."""


def tell_replicas(step: int) -> None:
    """Let the next step of this worker's replicas fail, as far as they have averaged with this one."""
    scope = current_scope()
    if scope is not None:
        scope.content(Turns).fail(step)


class Averages:
    """The averages of a share, each in its turn: replicas have them in the same order.

    Arguments:
      step: the id of the step.
      order: the stages of this worker that average, of all its shares, in the order in which they do.

    Attributes:
      begun: by stage, the averages that have begun.
    """

    def __init__(self, worker: Worker, turns: Turns, step: int, order: Sequence[int]):
        self._worker, self._turns, self._step, self._order = worker, turns, step, list(order)
        self._of_stages: dict[int, DataParallel] = {}
        self.begun: dict[int, concurrent.futures.Future[list[Any]]] = {}

    def __contains__(self, stage: int) -> bool:
        return stage in self._of_stages

    def find(self, stage: int, reference: RRef[Any]) -> None:
        """Take note of what averages a stage's gradients."""
        found = reference.local_value()
        if not isinstance(found, DataParallel):
            raise TypeError(f"a reference to a {type(found).__name__}, expected one to a DataParallel")
        self._of_stages[stage] = found

    def begin(self, stage: int, gradients: list[Any]) -> None:
        """Average a stage's gradients on another thread."""
        promise = self.begun[stage] = concurrent.futures.Future[list[Any]]()

        def average() -> None:
            try:
                if self._turns.closed:
                    self._give_up(stage)
                    raise ContextError("the context was closed before the stage's turn to average came")
                averages = self._of_stages[stage].average(gradients)
                self._turns.averaged(self._step, self._of_stages[stage])
                promise.set_result(averages)
            except BaseException as error:
                promise.set_exception(error)
            finally:
                self._turns.end(self._step, stage)

        self._run_after(self._before(stage), average)

    def abandon(self) -> None:
        """Tell the replicas of stages that will not be averaged in this step: they would average with the next."""
        left = [stage for stage in self._order if stage in self._of_stages and stage not in self.begun]
        told = {stage: Told() for stage in left}

        def abandon(stage: int) -> None:
            try:
                self._give_up(stage)
            finally:
                told[stage].set_result(None)
                self._turns.end(self._step, stage)

        before = {stage: self._before(stage) for stage in left}
        _telling.update({self._of_stages[stage]: weakref.ref(told[stage]) for stage in left})
        for place, stage in enumerate(left):
            earlier = [told[one] for one in left[:place][-1:]]
            self._run_after([*before[stage], *earlier], functools.partial(abandon, stage))

    def _run_after(self, before: Sequence[concurrent.futures.Future[Any]], task: Callable[[], None]) -> None:
        """Run a task on another thread as soon as these are done. Until then it has none, of which there may be few."""
        left = [one for one in before if not one.done()]
        if left:
            left[0].add_done_callback(lambda _: self._run_after(left[1:], task))
        else:
            self._worker.run(task)

    def _give_up(self, stage: int) -> None:
        with self._turns.giving_up:
            self._of_stages[stage].abandon()

    def _before(self, stage: int) -> list[concurrent.futures.Future[Any]]:
        """Return what ends before a stage may average: the turn of the one before, and word of failed steps."""
        place, told = self._order.index(stage), _telling.get(self._of_stages[stage], lambda: None)()
        earlier = [self._turns.over(self._step, one) for one in self._order[:place][-1:]]
        return earlier if told is None else [*earlier, told]
