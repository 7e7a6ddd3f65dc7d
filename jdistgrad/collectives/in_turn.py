"""Functions one after another on other threads of a worker: the operations of a group that run beside its program."""

import concurrent.futures
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from jdistgrad._compat import settings_of_results
from jdistgrad.collectives.host_arrays import as_set
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt

IDLE_SECONDS = 0.1


class InTurn:
    """Functions one after another, on a thread of the worker's pool, which soon goes on to other work if there is none.

    A thread that waited for ever would keep the worker that it belongs to. The functions have the settings of
    JAX that the thread has which submits them.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._runs = threading.Lock(), False
        self._latest: Callable[[], concurrent.futures.Future[Any] | None] = lambda: None

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        worker, future, chosen = current_worker(), InterruptibleFuture[Any](), settings_of_results()
        future.set_running_or_notify_cancel()  # nobody can cancel it: the other ranks run it too

        def run() -> None:
            try:
                with as_set(chosen):
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        with put_off_interrupt():  # or nobody might begin
            self._tasks.put(run)
            with self._lock:
                begins, self._runs = not self._runs, True
            if begins:
                worker.run(self._run)
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
            try:
                function = self._tasks.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    self._runs = not self._tasks.empty()
                    if not self._runs:
                        return
            else:
                function()
                del function
