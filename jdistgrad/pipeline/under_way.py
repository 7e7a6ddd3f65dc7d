"""The shares of steps that a worker carries out: what they wait for, what ends them, and what they do."""

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.worker import Worker

LOOK_SECONDS = 0.5  # between looks whether the world is broken, which no future tells


class Running(Protocol):
    """A share under way. ``ended``: done as soon as its context is closed."""

    step: int
    ended: concurrent.futures.Future[None]

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
            run.ended.set_result(None)

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
