"""The shares of steps that a worker carries out: what they wait for, what ends them, and what they do."""

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.worker import Worker

LOOK_SECONDS = 0.5  # between looks whether the world is broken, which no future tells


class Running(Protocol):
    """A share under way."""

    step: int
    waits: "Waits"

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

    Attributes:
      closed: done as soon as the context is closed.
      failed_elsewhere: whether the error that was raised is that of a watched future.
    """

    def __init__(self, worker: Worker, watched: Sequence[concurrent.futures.Future[Any]]):
        self._worker, self._watched = worker, list(watched)
        self.closed = concurrent.futures.Future[None]()
        self.failed_elsewhere = False

    def until(self, future: concurrent.futures.Future[Any]) -> None:
        """Return when the future is done."""
        while not future.done():
            self.for_any((future, self.closed))

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
        if self.closed.done():
            raise ContextError("the context was closed while a step of a pipeline was under way")


class UnderWay:
    """The shares that this worker carries out in a context."""

    def __init__(self) -> None:
        self.runs: set[Running] = set()
        self.done: set[int] = set()  # the steps of which shares were carried out
        self._closed = False

    @contextlib.contextmanager
    def holding(self, run: Running) -> Iterator[None]:
        """Hold a share, which fails if the context is closed, as long as it is under way."""
        self.runs.add(run)
        if self._closed:
            self._end(run)
        try:
            yield
        finally:
            self.runs.discard(run)
            self.done.add(run.step)

    def close(self) -> None:
        self._closed = True
        for run in self.runs.copy():
            self._end(run)

    def _end(self, run: Running) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # both threads have come to end it
            run.waits.closed.set_result(None)

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
