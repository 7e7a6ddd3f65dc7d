"""A queue of functions that run one after another on another thread: the operations of a group beside its program."""

import collections
import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jdistgrad._compat import settings_of_results
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt


class InTurn:
    """A queue of functions, which a thread of the worker's pool runs as long as there are any.

    A function runs with the JAX settings of the thread that submits it.
    """

    def __init__(self) -> None:
        self._tasks = collections.deque[Callable[[], None]]()
        self._lock, self._runs = threading.Lock(), False
        self._latest: Callable[[], concurrent.futures.Future[Any] | None] = lambda: None

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        worker, future, (x64, precision, device) = current_worker(), InterruptibleFuture[Any](), settings_of_results()
        future.set_running_or_notify_cancel()  # not to be cancelled: the other ranks run the function too

        def run() -> None:
            try:
                with jax.enable_x64(x64), jax.default_matmul_precision(precision), jax.default_device(device):
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        with put_off_interrupt():  # between the two steps
            with self._lock:
                self._tasks.append(run)
                begins, self._runs = not self._runs, True
            if begins:
                worker.run(self._run)
        self._latest = weakref.ref(future)  # the result may be large
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.submit(function, *args).result()

    def finish(self) -> None:
        """Wait until all submitted functions have run."""
        latest = self._latest()
        if latest is not None:
            latest.exception()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._runs = bool(self._tasks)
                if not self._runs:
                    return
                task = self._tasks.popleft()
            task()
            del task
