"""The pace of a thread that polls.

At first it polls without pause if its core would otherwise idle: waking a sleeping core costs 15 to 40 us. Then it naps
for a fixed share of the time in which nothing has happened, so an event after ``t`` quiet seconds is noticed at most
``t / SHARE`` late: 6 % of the time the other side took. An idle worker costs 2 to 5 % of a core. A thread that polls
beside others, which may compute, naps longer in the end: each time it wakes it takes up to 50 us from them.

Where other ranks ring (``doorbell``), a message ends the nap. The naps of a thread that waits still end by themselves,
since what other threads of this process do does not ring; but the longest are twice as long.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SPIN = 1e-3
SHORTEST = 20e-6
LONGEST = 1e-3
LONGEST_BESIDE_OTHERS = 4e-3
WITH_BELL = 2  # times as long, where those who send also ring
SHARE = 16

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
