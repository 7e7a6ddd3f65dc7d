"""Blocks that put off Ctrl-C to their end, and waits that it ends.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. Between finding and receiving a message,
or between sending two parts of a message, the exception would lose that message.

Entering a block must cost next to nothing, so the handler that puts off interrupts stays installed around the handler
it found. It is installed again when other code (a notebook, for every cell) has installed a handler of its own.
"""

import concurrent.futures
import os
import signal
import threading
import time

# signal.getsignal spends 1.5 us on turning the result into an enum.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_SECONDS = 0.25  # the longest sleep of the main thread, see ``wait_in_slices``

_main = threading.main_thread().ident
_blocks: list["put_off_interrupt"] = []  # the blocks that the main thread is in, innermost last


class Handler:
    """A handler around the previous handler. There is one for each, so that programs may save and restore handlers."""

    __slots__ = ("previous",)

    def __init__(self, previous: Callable[[int, FrameType | None], Any]):
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _blocks:
            _blocks[0].seen = _blocks[-1].seen = True
        else:
            self.previous(number, frame)


def _install() -> Handler | None:
    """Install our handler if need be, and return it; None if the program ignores SIGINT or lets it end the process."""
    current = getsignal(signal.SIGINT)
    if isinstance(current, Handler):
        return current
    if not callable(current):
        return None
    handler = Handler(current)
    signal.signal(signal.SIGINT, handler)
    return handler


def _in_child() -> None:
    """Make the thread that forked the main thread of the child; it is in no block of another thread."""
    global _main
    if threading.get_ident() != _main:
        _main = threading.get_ident()
        _blocks.clear()


os.register_at_fork(after_in_child=_in_child)


class put_off_interrupt:  # noqa: N801 used like a function
    """A block that Ctrl-C does not interrupt. ``seen`` tells that it was pressed; it takes effect when the block ends.

    In nested blocks it takes effect when the outermost block ends. Python interrupts only the main thread, so on other
    threads a block does nothing.
    """

    __slots__ = ("_handler", "seen")

    def __init__(self) -> None:
        self.seen = False
        self._handler: Handler | None = None

    def __enter__(self) -> "put_off_interrupt":
        if threading.get_ident() == _main:
            self._handler = _install()
            if self._handler is not None:
                _blocks.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _blocks.pop()
            if self.seen and not _blocks:
                self._handler.previous(signal.SIGINT, None)


def wait_in_slices(wait: Callable[[float | None], object], timeout: float | None = None) -> None:
    """Call ``wait(seconds)`` until it returns a true value or the timeout has passed.

    Python does not wake the main thread for a signal that arrives just before the thread falls asleep, or on another
    thread of the process. So the main thread sleeps for short times only.
    """
    if threading.get_ident() != _main:
        wait(timeout)
        return
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not wait(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
        pass


class InterruptibleFuture(concurrent.futures.Future[T]):
    """A future whose waits Ctrl-C ends."""

    def result(self, timeout: float | None = None) -> T:
        wait_in_slices(self._done_after, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        wait_in_slices(self._done_after, timeout)
        return super().exception(0)

    def _done_after(self, seconds: float | None) -> bool:
        try:
            super().exception(seconds)
        except TimeoutError:
            return False
        return True


def wait_for_first(futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None = None) -> None:
    """Return when one of the futures is done or the timeout has passed."""

    def wait(seconds: float | None) -> object:
        concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)
        return any(one.done() for one in futures)

    wait_in_slices(wait, timeout)
