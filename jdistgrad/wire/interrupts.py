"""Defer Ctrl-C inside a block; interruptible waits.

Python runs signal handlers between any two bytecodes of the main thread, and Ctrl-C's raises KeyboardInterrupt. Between
probing for and receiving a message, or between sending two parts of one, an exception would lose that message.

Entering a block must cost next to nothing, so the deferring handler stays installed around the handler that it found.
It is installed again when other code (a notebook, for every cell) has installed a handler.
"""

import concurrent.futures
import dataclasses
import signal
import threading
import time

# signal.getsignal spends 1.5 us on turning the result into an enum.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

from jdistgrad.threads import is_called_by_c, signal_again

T = TypeVar("T")

SLICE_SECONDS = 0.1  # the longest sleep of the main thread, see ``wait_in_slices``

_main = threading.main_thread().ident
_blocks: list["put_off_interrupt"] = []  # the blocks that the main thread is in
pending: list["Handler"] = []  # of a Ctrl-C that has come in these blocks


@dataclasses.dataclass(slots=True, eq=False)
class Handler:
    """A handler around the previous one; one object for each, so that programs may save and restore handlers."""

    previous: Callable[[int, FrameType | None], Any]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _blocks:
            pending[:] = [self]
        elif is_called_by_c(frame):
            signal_again(number)
        else:
            self.previous(number, frame)


def has_come() -> bool:
    """Return whether this thread defers a Ctrl-C, and so should leave its block soon."""
    return bool(pending) and threading.get_ident() == _main


class put_off_interrupt:  # noqa: N801 used like a function
    """Defer Ctrl-C to the end of the (outermost) block.

    Python interrupts only the main thread, so the block does nothing on other threads, nor without a handler.
    """

    __slots__ = ("_on_main",)

    def __enter__(self) -> None:
        self._on_main = threading.get_ident() == _main
        if self._on_main:
            current = getsignal(signal.SIGINT)
            if type(current) is not Handler and callable(current):
                signal.signal(signal.SIGINT, Handler(current))
            _blocks.append(self)

    def __exit__(self, *error: object) -> None:
        if self._on_main:
            _blocks.pop()
            if pending and not _blocks:
                pending.pop().previous(signal.SIGINT, None)


def wait_in_slices(wait: Callable[[float | None], object], timeout: float | None = None) -> None:
    """Call ``wait(seconds)`` until it returns a true value or the timeout has passed.

    The main thread sleeps for short times only: Python does not wake the thread for a signal that arrives just before
    the sleep, or on another thread of the process.
    """
    if threading.get_ident() != _main:
        wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while not wait(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic()))) and time.monotonic() < deadline:
        pass


class SteadyCondition(threading.Condition):
    """A condition that is not left locked when a signal handler raises.

    The base class acquires and releases in Python, where a handler may run in between; the lock itself does so in C.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class InterruptibleFuture(concurrent.futures.Future[T]):
    """A future whose waits Ctrl-C can end; the future can still be completed then."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = SteadyCondition()

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
