"""Threads that wait for an answer while another one looks for messages: asleep until it comes, or they are to look."""

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Sequence

INTERRUPT_SECONDS = 0.02  # how often the main thread wakes to see whether Ctrl-C was pressed


class Sleepers:
    """Who sleeps. ``wake`` wakes one, the latest; each entry is taken out once, by whoever wakes it or by itself."""

    def __init__(self) -> None:
        self._asleep: dict[int, concurrent.futures.Future] = {}
        self._numbers = itertools.count()

    def enter(self) -> int:
        """A new entry, which from now on may be woken."""
        number = next(self._numbers)
        self._asleep[number] = concurrent.futures.Future()
        return number

    def sleep(self, number: int, futures: Sequence[concurrent.futures.Future], deadline: float) -> None:
        """Return when one of the futures is done, the time is over, or this entry was woken. Or now and then."""
        called = self._asleep.get(number)
        longest = INTERRUPT_SECONDS if threading.current_thread() is threading.main_thread() else float("inf")
        seconds = min(longest, deadline - time.monotonic())
        if called is not None and seconds > 0:
            limit = None if seconds == float("inf") else seconds
            concurrent.futures.wait((*futures, called), limit, concurrent.futures.FIRST_COMPLETED)

    def leave(self, number: int) -> None:
        self._asleep.pop(number, None)

    def wake(self) -> bool:
        """Wake one; whether there was one."""
        if not self._asleep:
            return False
        try:
            _, called = self._asleep.popitem()
        except KeyError:  # it has left
            return False
        called.set_result(None)
        return True

    def wake_all(self) -> None:
        while self.wake():
            pass
