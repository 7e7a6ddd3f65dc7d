"""The shares of steps that a worker carries out: what they wait for, what ends them, and what they do.

And the averages of stages' gradients with the stages' replicas in other pipelines, while other stages compute.
"""

import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.worker import Worker

Told = concurrent.futures.Future[None]

LOOK_SECONDS = 0.5  # between looks whether the world is broken, which no future tells


class Running(Protocol):
    """A share under way."""

    step: int

    def doing(self) -> str: ...


def wait_for_any(worker: Worker, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Return when one of the futures is done, or after a while. Raise the error of a world that is broken."""
    worker.wait_for(futures, None)
    if not any(one.done() for one in futures):  # a single future in one process: see ``Transport.wait_for``
        concurrent.futures.wait(futures, LOOK_SECONDS, concurrent.futures.FIRST_COMPLETED)
    if worker.failure is not None:
        raise worker.failure


def forget_done(futures: list[concurrent.futures.Future[Any]]) -> None:
    """Remove the futures that are done; raise the error of the first that has one.

    The future is dropped before: it holds the error, whose traceback holds this frame.
    """
    for number in reversed(range(len(futures))):
        if futures[number].done():
            error = futures.pop(number).exception()
            if error is not None:
                try:
                    raise error
                finally:
                    del error


class Waits:
    """The waits of a share, which end early if its context is closed or the step has failed elsewhere.

    Arguments:
      watched: the error of one of these futures ends the share.

      closed: done as soon as the context is closed.

    Attributes:
      failed_elsewhere: whether the error that was raised is that of a watched future.
    """

    def __init__(self, worker: Worker, watched: Sequence[concurrent.futures.Future[Any]], closed: Told):
        self._worker, self._watched, self._closed = worker, list(watched), closed
        self.failed_elsewhere = False

    def until(self, future: concurrent.futures.Future[Any]) -> None:
        """Return when the future is done."""
        while not future.done():
            self.for_any((future, self._closed))

    def for_any(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Return when one of the futures is done, or after a while."""
        wait_for_any(self._worker, (*futures, *self._watched))
        self.check()

    def check(self) -> None:
        """Raise if the step has failed elsewhere: a share may have all that its actions need, and much to do."""
        if any(one.done() for one in self._watched):
            try:
                forget_done(self._watched)
            except BaseException:
                self.failed_elsewhere = True
                raise
        if self._closed.done():
            raise ContextError("the context was closed while a step of a pipeline was under way")


class UnderWay:
    """The shares that this worker carries out in a context."""

    def __init__(self) -> None:
        self.runs: set[Running] = set()
        self.done: set[int] = set()  # the steps of which shares were carried out
        self.closed = Told()

    @contextlib.contextmanager
    def holding(self, run: Running) -> Iterator[None]:
        self.runs.add(run)
        try:
            yield
        finally:
            self.runs.discard(run)
            self.done.add(run.step)

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def give_up(self, error: BaseException) -> None:
        """Do nothing: what the shares wait for fails by itself."""


def doing(step: int) -> str:
    """Say what this worker does in a step of the current context."""
    scope = current_scope()
    if scope is None:
        return "nothing yet"
    found = scope.content(UnderWay)
    idle = "done" if step in found.done else "nothing yet"
    return "; ".join(run.doing() for run in found.runs.copy() if run.step == step) or idle


# Replicas must hear of a failed step before the next average begins here: they would pair the two. Until then whoever
# tells them holds the future; afterwards nobody needs it, nor what has waited for it, which holds the DataParallel.
_telling: "weakref.WeakKeyDictionary[DataParallel, weakref.ref[Told]]" = weakref.WeakKeyDictionary()


class Turns:
    """Whose turn it is to average on this worker, in the steps of a context: a worker may carry out several shares.

    Attributes:
      closed: whether the context has been closed: a stage whose turn has not come averages no more.
    """

    def __init__(self) -> None:
        self._over: dict[tuple[int, int], concurrent.futures.Future[None]] = {}
        self._averaged: dict[int, list[DataParallel]] = {}  # by step
        self._failed: set[int] = set()
        self._lock = threading.Lock()
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
                    self._of_stages[stage].abandon()
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
                self._of_stages[stage].abandon()
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

    def _before(self, stage: int) -> list[concurrent.futures.Future[Any]]:
        """Return what ends before a stage may average: the turn of the one before, and word of failed steps."""
        place, told = self._order.index(stage), _telling.get(self._of_stages[stage], lambda: None)()
        earlier = [self._turns.over(self._step, one) for one in self._order[:place][-1:]]
        return earlier if told is None else [*earlier, told]
