"""The averages of stages' gradients with the stages' replicas in other pipelines, while other stages compute."""

import concurrent.futures
import weakref
from collections.abc import Iterable
from typing import Any

from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.worker import Worker

# Replicas must hear of a failed step before the next average begins here: they would pair the two.
_telling: "weakref.WeakKeyDictionary[DataParallel, concurrent.futures.Future[None]]" = weakref.WeakKeyDictionary()


class Averages:
    """The averages that a worker makes in one step, one after the other: replicas have them in the same order.

    Attributes:
      begun: by stage, the averages that have begun.
    """

    def __init__(self, worker: Worker):
        self._worker = worker
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
        promise, before = concurrent.futures.Future[list[Any]](), self._before([stage])
        self.begun[stage] = promise

        def average() -> None:
            try:
                concurrent.futures.wait(before)
                promise.set_result(self._of_stages[stage].average(gradients))
            except BaseException as error:
                promise.set_exception(error)

        self._worker.run(average)

    def abandon(self) -> None:
        """Tell the replicas of stages that will not be averaged in this step: they would average with the next."""
        left = [stage for stage in self._of_stages if stage not in self.begun]
        before = self._before(left)
        told = concurrent.futures.Future[None]()

        def abandon() -> None:
            try:
                concurrent.futures.wait(before)
                for stage in left:
                    self._of_stages[stage].abandon()
            finally:
                told.set_result(None)

        if left:
            _telling.update(dict.fromkeys((self._of_stages[stage] for stage in left), told))
            self._worker.run(abandon)

    def _before(self, stages: Iterable[int]) -> list[concurrent.futures.Future[Any]]:
        """Return what ends before these stages may average: this step's averages so far, and word of failed steps."""
        mine = [self._of_stages[stage] for stage in stages]
        return [*self.begun.values(), *(_telling[one] for one in mine if one in _telling)]
