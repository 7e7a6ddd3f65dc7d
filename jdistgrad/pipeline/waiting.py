"""Waits of a step on one worker, and averages of stages' gradients in the background."""

import collections
import concurrent.futures
import contextlib
import math
import threading
import time
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

from jdistgrad.collectives.host import InTurn
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import CallTimeoutError, ContextError
from jdistgrad.rpc.claims import emptied
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.worker import Worker

Future = concurrent.futures.Future[Any]

LOOK_SECONDS = 0.5  # between checks whether the world has failed, which completes no future


class Waits:
    """The waits of a step on one worker. All end when the step fails on any worker.

    Arguments:
      closed: done when the step's context is closed.
      seconds: the timeout of the step, on the worker that drives it.

    Attributes:
      answers: on the driving worker, those of the other workers: an error among them ends the step.
      failed_elsewhere: whether the error is from an answer.
    """

    def __init__(self, worker: Worker, closed: Future, seconds: float = math.inf):
        self._worker, self._closed, self._seconds = worker, closed, seconds
        self._begun = time.monotonic()
        self.answers: list[Future] = []
        self.failed_elsewhere = False

    def for_any(self, futures: Sequence[Future]) -> None:
        """Return when a future is done, or after LOOK_SECONDS. Raise if the step has failed."""
        self._worker.transport.wait_for((*futures, self._closed, *self.answers), LOOK_SECONDS)
        self._require_success()

    def check(self) -> float:
        """Return the time. Raise if the step has timed out or failed: a share may never wait for others."""
        now = time.monotonic()
        if now - self._begun > self._seconds:
            raise CallTimeoutError(
                f"a step of a pipeline took longer than {self._seconds:g} s. If it may, give a longer timeout to the "
                "pipeline (timeout=) or the world (init(timeout=)).",
                seconds=self._seconds,
            )
        self._require_success()
        return now

    def _require_success(self) -> None:
        if self._worker.failure is not None:
            raise self._worker.failure
        for number in reversed(range(len(self.answers))):
            if self.answers[number].done():
                error = self.answers.pop(number).exception()  # after pop: it holds the error, which holds this frame
                if error is not None:
                    self.failed_elsewhere = True
                    try:
                        raise error
                    finally:
                        del error
        if self._closed.done():
            raise ContextError("the context was closed while a step of a pipeline was under way")


class Averages:
    """The averages of a worker's stages in a step, while other stages compute.

    Arguments:
      by: the ``DataParallel`` of each stage, in the replicas' order.
      turns: runs the averages one after another.
    """

    def __init__(self, by: Mapping[int, DataParallel], turns: InTurn):
        self._by, self._left, self._failed = by, len(by), False
        self._gradients: dict[int, Future] = {stage: Future() for stage in by}  # cancelled: they will not come
        self._averaged = collections.deque[DataParallel]()
        self._promises = {stage: turns.submit(self._average, stage) for stage in by}

    def begin(self, stage: int, gradients: list[Any]) -> Future:
        with contextlib.suppress(concurrent.futures.InvalidStateError, KeyError):  # it has been abandoned
            self._gradients[stage].set_result(gradients)
        return self._promises.pop(stage)

    def _average(self, stage: int) -> Any:
        by = self._by[stage]
        try:
            gradients = self._gradients[stage].result()
        except concurrent.futures.CancelledError:
            with contextlib.suppress(Exception):  # the step raises its own error
                by.abandon()
            raise ContextError("the context was closed before the stage's gradients were averaged") from None
        finally:
            self._gradients.pop(stage)
        averages = by.average(gradients)
        self._left -= 1
        self._averaged.append(by)
        if self._failed:
            self.fail()
        return averages

    def abandon(self, stages: Container[int]) -> None:
        """Fail the replicas' averages of stages that will not come: they would be paired with the next step's."""
        for stage, gradients in self._gradients.copy().items():
            if stage in stages:
                gradients.cancel()

    def fail(self) -> None:
        """Abandon all stages. Where replicas have averaged already, their next step fails."""
        self._failed = True
        self.abandon(self._by)
        for by in emptied(self._averaged):
            with contextlib.suppress(Exception):  # the step raises its own error
                by.abandon()

    def close(self) -> None:
        if self._left:
            self.fail()


# Steps whose first DataParallel is the same average one after another: else the averages of a step could be paired with
# those of a failed step before it, of whose failure the replicas do not know yet.
_turns: "weakref.WeakKeyDictionary[DataParallel, InTurn]" = weakref.WeakKeyDictionary()


class StepsHere:
    """The steps of pipelines in a context on this worker: running shares, and averages by step."""

    def __init__(self) -> None:
        self.shares: set[Any] = set()
        self.averages: dict[int, Averages] = {}
        self.closed = Future()
        self._lock = threading.Lock()

    def averages_of(self, step: int, by: Mapping[int, DataParallel]) -> Averages:
        with self._lock:
            if step not in self.averages:
                self.averages[step] = Averages(by, _turns.setdefault(next(iter(by.values())), InTurn()))
        if self.closed.done():
            self.averages[step].fail()
        return self.averages[step]

    def close(self) -> None:
        self.closed.set_result(None)
        for one in list(self.averages.values()):
            one.close()

    def give_up(self, error: BaseException) -> None:
        """Do nothing: the shares' waits fail by themselves, and other shares still average."""


def fail_step(step: int) -> str:
    """Fail a step's averages on this worker; return what the worker is doing for the step, in words."""
    scope = current_scope()
    assert scope is not None
    here = scope.content(StepsHere)
    if step in here.averages:
        here.averages[step].fail()
    return "; ".join(one.doing() for one in here.shares.copy() if one.step == step) or "nothing (any more, or yet)"
