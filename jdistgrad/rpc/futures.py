"""The future of a call. The thread that asks for the answer opens it, not the thread that moves messages."""

import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any


class Promise(concurrent.futures.Future[Any]):
    """The future of a value that users' code makes. Its base class ignores an exception that is false as a bool."""

    def result(self, timeout: float | None = None) -> Any:
        error = self.exception(timeout)
        if error is None:
            return super().result()
        try:
            raise error
        finally:
            error = None  # the traceback refers to this frame


class CallFuture(concurrent.futures.Future[Any]):
    """A ``concurrent.futures.Future`` whose result may still have to be unpacked.

    Unpacking can import modules and copy arrays, and callbacks run users' code: the transport's thread must do
    neither. So an answer is stored as it came, and ``result`` opens it. If the future has callbacks, a serving thread
    completes it.
    """

    def __init__(self, wait_for: Callable[[Sequence[concurrent.futures.Future[Any]], float | None], None]):
        super().__init__()
        self._wait_for = wait_for
        self._open: Callable[[], Any] | None = None
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._opening = threading.Lock()
        self._has_callbacks = False

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[Any]], object]) -> None:
        with self._opening:
            self._has_callbacks = True
        super().add_done_callback(fn)

    def answer(self, opener: Callable[[], Any], run_elsewhere: Callable[[Callable[[], Any]], None]) -> None:
        """Complete the future. ``opener`` returns the value or raises; ``run_elsewhere`` starts a task on a thread."""
        if not self.set_running_or_notify_cancel():
            return
        with self._opening:
            self._open = opener
            if not self._has_callbacks:
                self.set_result(None)
                return
        run_elsewhere(functools.partial(self.set_result, None))

    def result(self, timeout: float | None = None) -> Any:
        super().result(self._time_left_after_waiting(timeout))
        value, error = self._opened()
        if error is None:
            return value
        try:
            raise error
        finally:
            error = None  # the traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(self._time_left_after_waiting(timeout))
        return error if error is not None else self._opened()[1]

    def _time_left_after_waiting(self, timeout: float | None) -> float | None:
        start = time.monotonic()
        self._wait_for((self,), timeout)
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - start))

    def _opened(self) -> tuple[Any, BaseException | None]:
        with self._opening:
            if self._outcome is None:
                assert self._open is not None
                try:
                    self._outcome = self._open(), None
                except BaseException as error:
                    self._outcome = None, error
                self._open = None
            return self._outcome

    def __reduce__(self) -> Any:
        raise TypeError(
            "a future cannot be sent to another worker: return it from the remote function (the answer then goes out "
            "when it is done), or send its result()"
        )
