"""Threads that sleep while another thread looks for messages, until their answer comes or they have to look."""

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

INTERRUPT_SECONDS = 0.02  # how often the main thread wakes to see whether Ctrl-C was pressed


class Sleepers:
    """The sleeping threads. ``wake`` wakes the latest. A thread's entry is removed once, by the waker or the thread."""

    def __init__(self) -> None:
        self._asleep: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count()

    def enter(self) -> int:
        """Add an entry for this thread, which may be woken from now on; return its number."""
        number = next(self._numbers)
        self._asleep[number] = concurrent.futures.Future()
        return number

    def sleep(self, number: int, futures: Sequence[concurrent.futures.Future[Any]], deadline: float) -> None:
        """Return when a future is done, the deadline has passed or this entry was woken; now and then also earlier."""
        called = self._asleep.get(number)
        longest = INTERRUPT_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
        seconds = min(longest, deadline - time.monotonic())
        if called is not None and seconds > 0:
            concurrent.futures.wait((*futures, called), seconds, concurrent.futures.FIRST_COMPLETED)

    def leave(self, number: int) -> None:
        self._asleep.pop(number, None)

    def wake(self) -> bool:
        """Wake the latest sleeper; return whether there was one."""
        if not self._asleep:
            return False
        try:
            _, called = self._asleep.popitem()
        except KeyError:  # the last sleeper has just left
            return False
        called.set_result(None)
        return True

    def wake_all(self) -> None:
        while self.wake():
            pass
