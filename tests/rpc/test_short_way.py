"""The short way of a message: how many functions a plain call runs on each side."""

import collections
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.programs import identity
from helpers.worlds import needs_pickling, on_worker0, wire_world as wire_world

import jdistgrad as jd

CALLS = 640
# A wait takes as many looks as the other side takes time: what it runs is not counted.
WAITING = "mpi_progress.py", "doorbell.py", "polling.py", "contextlib.py", "interrupts.py"
LOOKS = "_look", "_take_frame", "_something_came"
MOST = 120  # aimed at 110


class Counts:
    """Counts the functions that threads begin, those in C among them, until ``stopped``.

    Arguments:
      once: a function that each call runs once.
    """

    def __init__(self, once):
        self.once, self.of, self.stopped = once.__code__, collections.Counter(), False

    def __call__(self, frame, event, function):
        code = frame.f_code
        if self.stopped:
            sys.setprofile(None)
        elif code.co_filename.endswith(WAITING) or code.co_name in LOOKS:
            return
        elif event == "call":
            self.of[frame.f_code] += 1
        elif event == "c_call":
            self.of[function.__qualname__] += 1

    def each_call(self):
        """Return how many functions each call runs, but for its wait.

        The call that begins to count and the one that stops it may add up to one more.
        """
        self.stopped, calls = True, self.of[self.once]
        return sum(count // calls for count in self.of.copy().values() if count % calls in (0, count // calls))


_counting = []


def begin():
    """Count on the thread that serves this call, which mostly serves the next ones too."""
    _counting[:] = [Counts(identity)]
    sys.setprofile(_counting[0])


def each_call():
    """Return how many calls the thread has served, and how many functions each runs."""
    served = _counting[0].of[identity.__code__]
    return served, _counting[0].each_call() if served else 0


@needs_pickling
@on_worker0
@pytest.mark.parametrize("make", [lambda: np.ones(1, np.float32), lambda: jnp.ones(1)], ids=["NumPy", "JAX"])
def test_a_call_runs_few_functions(wire_world, make):
    value, mine = make(), Counts(jd.rpc_sync)
    for _ in range(3):
        jd.rpc_sync(1, identity, args=(value,))
    sys.setprofile(mine)
    try:
        for _ in range(CALLS):
            jd.rpc_sync(1, identity, args=(value,))
    finally:
        sys.setprofile(None)
    assert 20 < mine.each_call() <= MOST
    for _ in range(5):
        jd.rpc_sync(1, begin)
        for _ in range(CALLS):
            jd.rpc_sync(1, identity, args=(value,))
        served, most = jd.rpc_sync(1, each_call)
        if served >= CALLS // 2:  # else another thread has taken its place
            assert 20 < most <= MOST
