"""The pace of a thread that polls, and threads that sleep while another one polls.

At first it polls without pause if its core would otherwise idle: waking a sleeping core costs 15 to 40 us. Then it naps
for a fixed share of the time in which nothing has happened, so an event after ``t`` quiet seconds is noticed at most
``t / SHARE`` late: 6 % of the time the other side took. An idle worker costs 2 to 5 % of a core. A thread that polls
beside others, which may compute, naps longer in the end: each time it wakes it takes up to 50 us from them.

Where other ranks ring (``doorbell``), a message ends the nap. The naps of a thread that waits still end by themselves,
since what other threads of this process do does not ring; but the longest are twice as long.
"""

import concurrent.futures
import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

SPIN = 1e-3
SHORTEST = 20e-6
LONGEST = 1e-3
LONGEST_BESIDE_OTHERS = 4e-3
WITH_BELL = 2  # times as long, where those who send also ring
SHARE = 16
INTERRUPT_SECONDS = 0.02  # how often the main thread wakes to see whether Ctrl-C was pressed

_tuned = threading.local()


def nap(quiet: float, *, may_spin: bool, longer: float = 1) -> float:
    """Return the seconds to sleep when nothing has happened for ``quiet`` seconds; 0 means to poll again at once.

    Arguments:
      longer: by what the longest naps are multiplied.
    """
    if may_spin and quiet < SPIN:
        return 0.0
    return min(longer * (LONGEST if may_spin else LONGEST_BESIDE_OTHERS), max(SHORTEST, quiet / SHARE))


def pause(seconds: float) -> None:
    """Sleep on time; for 0 seconds, just let others run."""
    if seconds <= 0:
        os.sched_yield()
        return
    wake_on_time()
    time.sleep(seconds)


def wake_on_time() -> None:
    """Have this thread woken when its sleeps end: Linux may add 50 us to each otherwise."""
    if not getattr(_tuned, "done", False):
        _tuned.done = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, for this thread


def poll(done: Callable[[], Any], timeout: float, check: Callable[[], None] = lambda: None) -> bool:
    """Wait until ``done()``, without spinning: others may need the core. Return False after ``timeout`` seconds."""
    start = time.monotonic()
    while not done():
        check()
        quiet = time.monotonic() - start
        if quiet > timeout:
            return False
        pause(nap(quiet, may_spin=False))
    return True


class Sleepers:
    """Threads that sleep until their answer comes or they are woken to look for it; ``wake`` wakes the latest.

    A thread's entry is removed once, by the waker or the thread.
    """

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
