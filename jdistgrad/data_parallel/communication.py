"""The thread that reduces: one for each DataParallel, so that its collectives have one order."""

import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jdistgrad._compat import configured


class Communication:
    """Runs functions one after the other on a thread of its own. It ends when its owner is gone."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The thread computes where its maker does: a local worker has a device of its own.
        self._thread = threading.Thread(
            target=_serve, args=(self._tasks, configured("jax_default_device")), name=name, daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._tasks.put, None)

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._tasks.put((future, function, args))
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function there and wait for what it returns."""
        return self.submit(function, *args).result()

    def close(self) -> None:
        self._finalizer()


def _serve(tasks: "queue.SimpleQueue[Any]", device: Any) -> None:
    with jax.default_device(device) if device is not None else contextlib.nullcontext():
        while (task := tasks.get()) is not None:
            future, function, args = task
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, function, args
