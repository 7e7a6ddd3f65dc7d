"""The pace of a thread that polls, where no bell rings: ranks on other machines, and MPI's own operations.

At first it polls without pause: waking up takes as long. Then it naps for a fixed share of the quiet time, so an event
after ``t`` quiet seconds is noticed at most ``t / SHARE`` late: 6 % of the time the other side took.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

AT_ONCE = 200e-6  # for how long to poll without pause
SHORTEST = 20e-6
LONGEST = 4e-3
SHARE = 16

_tuned = threading.local()


def nap(quiet: float) -> float:
    """Return the seconds to sleep when nothing has happened for ``quiet`` seconds."""
    return min(LONGEST, max(SHORTEST, quiet / SHARE))


def pause(seconds: float) -> None:
    """Sleep on time."""
    wake_on_time()
    time.sleep(seconds)


def wake_on_time() -> None:
    """Have this thread woken when its sleeps end: Linux adds up to 50 us to each by default (prctl(2))."""
    if not getattr(_tuned, "done", False):
        _tuned.done = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK, for this thread


def poll(done: Callable[[], Any], timeout: float, check: Callable[[], None] = lambda: None) -> bool:
    """Wait until ``done()``; return False after ``timeout`` seconds."""
    start = time.monotonic()
    while not done():
        check()
        quiet = time.monotonic() - start
        if quiet > timeout:
            return False
        if quiet > AT_ONCE:
            pause(nap(quiet))
    return True
