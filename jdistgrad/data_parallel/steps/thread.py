"""The communication thread: one for each DataParallel, so that its collectives have one order."""

import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jdistgrad._compat import configured
from jdistgrad.data_parallel.buckets.host_arrays import as_set, settings
from jdistgrad.threads import join_soon, started
from jdistgrad.wire.interrupts import InterruptibleFuture


class Communication:
    """A thread that runs functions one after the other. It ends when this object is gone."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._latest: Callable[[], concurrent.futures.Future[Any] | None] = lambda: None
        # The thread computes on its maker's device: a local worker has a device of its own.
        thread = started(_serve, name, self._tasks, configured("jax_default_device"))
        weakref.finalize(self, _end, self._tasks, thread)

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        future = InterruptibleFuture[Any]()
        self._tasks.put((future, settings(), function, args))
        self._latest = weakref.ref(future)  # the result may be large
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the thread and wait for its result."""
        return self.submit(function, *args).result()

    def finish(self) -> None:
        """Wait until the thread has run all that it was given."""
        latest = self._latest()
        if latest is not None:  # else it has been run, and nobody waits for its result
            latest.exception()


def _end(tasks: "queue.SimpleQueue[Any]", thread: threading.Thread) -> None:
    tasks.put(None)
    join_soon([thread])


def _serve(tasks: "queue.SimpleQueue[Any]", device: Any) -> None:
    with jax.default_device(device) if device is not None else contextlib.nullcontext():
        while (task := tasks.get()) is not None:
            future, chosen, function, args = task
            try:
                with as_set(chosen):
                    future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, chosen, function, args
