"""The shares of steps that a worker carries out: what they wait for, what ends them, and what they do.

And the averages of stages' gradients with the stages' replicas in other pipelines, while other stages compute.
"""

import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import Worker

Told = concurrent.futures.Future[None]

LOOK_SECONDS = 0.5  # between looks whether the world is broken, which no future tells


def wait_for_any(worker: Worker, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Return when one of the futures is done, or after a while. Raise the error of a world that is broken."""
    worker.transport.wait_for(futures, None)
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


class UnderWay:
    """What this worker does in a context: shares of steps, and averages with replicas."""

    def __init__(self) -> None:
        self.runs: set[Any] = set()  # of ``shares.Run``
        self.done: set[int] = set()  # the steps of which shares were carried out
        self.closed = Told()
        self._averages: dict[int, Averages] = {}  # by step

    def averages_of(self, step: int) -> "Averages":
        return self._averages.setdefault(step, Averages(self.closed))

    def close(self) -> None:
        self.closed.set_result(None)
        for one in list(self._averages.values()):
            one.abandon(one.order)

    def give_up(self, error: BaseException) -> None:
        """Do nothing. What the shares wait for fails by itself; those that do not fail still average."""


def doing(step: int) -> str:
    scope = current_scope()
    if scope is None:
        return "nothing yet"
    found = scope.content(UnderWay)
    idle = "done" if step in found.done else "nothing yet"
    return "; ".join(run.doing() for run in found.runs.copy() if run.step == step) or idle


def tell_replicas(step: int) -> None:
    """Let the next step of this worker's replicas fail, as far as they have averaged with this one."""
    scope = current_scope()
    if scope is not None:
        scope.content(UnderWay).averages_of(step).fail()


# When the step before has ended in which each of these was used. Its replicas must hear that it has failed before the
# next average begins here: they would pair the two.
_latest: "weakref.WeakKeyDictionary[DataParallel, Told]" = weakref.WeakKeyDictionary()


class Averages:
    """The averages of stages in a step, of all shares of this worker: replicas have them in the same order.

    A thread goes from stage to stage, and waits for the gradients of each.

    Arguments:
      closed: done as soon as the context is closed: a stage whose turn has not come averages no more.

    Attributes:
      order: all stages of this worker that average, in the order of their turns.
    """

    def __init__(self, closed: Told):
        self._closed, self._ended = closed, Told()
        self.order: list[int] = []
        self._by: dict[int, tuple[DataParallel, Told]] = {}  # and what ends before it may be used, by stage
        self._given: dict[int, concurrent.futures.Future[Any]] = {}  # gradients and a promise, or None: there are none
        self._averaged: list[DataParallel] = []
        self._failed = False
        self._lock = threading.Lock()

    def find(self, worker: Worker, order: list[int], stage: int, reference: RRef[Any]) -> None:
        """Find the ``DataParallel`` of a stage. ``order``: all stages of this worker that average in this step."""
        found = reference.local_value()
        if not isinstance(found, DataParallel):
            raise TypeError(f"a reference to a {type(found).__name__}, expected one to a DataParallel")
        with self._lock:
            begins, self.order = not self.order, order
            # Of this step's own stages the first to be found need not be the first to average: all wait for one.
            mine = next((told for one, told in self._by.values() if one is found), None)
            before = mine or _latest.get(found, self._ended)
            self._by[stage], _latest[found] = (found, before), self._ended
        if begins:
            worker.run(self._run)
        if self._closed.done():
            self.abandon(order)

    def begin(self, stage: int, gradients: list[Any]) -> concurrent.futures.Future[list[Any]]:
        promise = concurrent.futures.Future[list[Any]]()
        if not self._give(stage, (gradients, promise)):
            promise.set_exception(ContextError("the context was closed before the stage's turn to average came"))
        return promise

    def abandon(self, stages: Iterable[int]) -> None:
        """Tell the replicas of stages that will not be averaged in this step: they would average with the next."""
        for stage in stages:
            self._give(stage, None)

    def fail(self) -> None:
        """Let the replicas' next step fail: they have averaged with a step that has failed since, and do not know."""
        with self._lock:
            self._failed, averaged = True, self._averaged
            self._averaged = []
        for one in averaged:
            one.abandon()

    def _give(self, stage: int, given: Any) -> bool:
        future = self._future_of(stage)
        with self._lock:
            if future.done():
                return False
            future.set_result(given)
            return True

    def _future_of(self, stage: int) -> concurrent.futures.Future[Any]:
        with self._lock:
            return self._given.setdefault(stage, concurrent.futures.Future())

    def _run(self) -> None:
        try:
            for stage in self.order:
                given = self._future_of(stage).result()
                if stage in self._by:  # else its share has not come so far
                    with contextlib.suppress(Exception):  # it cannot be given up: the step raises what it fails of
                        self._average(*self._by[stage], given)
        finally:
            self._given.clear()
            self._ended.set_result(None)

    def _average(self, by: DataParallel, before: Told, given: Any) -> None:
        if before is not self._ended:
            before.result()
        if given is None or self._closed.done():
            by.abandon()
            return
        gradients, promise = given
        try:
            averages = by.average(gradients)
        except BaseException as error:
            promise.set_exception(error)
            return
        with self._lock:
            self._averaged.append(by)
        if self._failed:
            self.fail()
        promise.set_result(averages)
