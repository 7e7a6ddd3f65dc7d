"""Functions one after another on other threads of a worker: the operations of a group that run beside its program."""

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jdistgrad.collectives.host_arrays import as_set, settings
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt


class InTurn:
    """Functions one after another, on threads of the worker's pool, which go on to other work when there is none left.

    A thread that waited for the next one would keep the worker that it belongs to. The functions have the settings of
    JAX that the thread has which submits them.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._lock, self._runs = threading.Lock(), False
        self._latest: Callable[[], concurrent.futures.Future[Any] | None] = lambda: None

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future, chosen = InterruptibleFuture[Any](), settings()

        def run() -> None:
            try:
                with as_set(chosen):
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        with put_off_interrupt():  # or nobody might begin
            with self._lock:
                self._waiting.append(run)
                begins, self._runs = not self._runs, True
            if begins:
                current_worker().run(self._run)
        self._latest = weakref.ref(future)  # the result may be large
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.submit(function, *args).result()

    def finish(self) -> None:
        """Wait until all functions have run that were submitted."""
        latest = self._latest()
        if latest is not None:  # else it has been run, and nobody waits for its result
            latest.exception()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._runs = bool(self._waiting)
                if not self._waiting:
                    return
                function = self._waiting.popleft()
            function()
            del function
