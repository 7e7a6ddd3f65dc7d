"""Job of surviving.py, with `--survive`: the same calls and steps with a part of survival switched on and off, in turn.

The parts are the search for dead ranks beside calls, and the ranks' vote after each step.
"""

import os

os.environ["NPROC"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import math
import pathlib
import statistics
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from jobs.surviving_jdistgrad import MODELS, echo
from measure import few, median, report

import jdistgrad as jd
from jdistgrad.data_parallel.reducer import Reducer
from jdistgrad.rpc.worker import current_worker

CALLS = 100, few(300)  # in a block, and blocks
STEPS = {"small": (100, few(200)), "wide": (10, few(60))}
VOTES = Reducer.votes


def search(on):
    current_worker().transport._next_check = 0.0 if on else math.inf


def search_on_both(on):
    search(on)
    jd.rpc_sync(1, search, args=(on,))


def vote(on):
    Reducer.votes = VOTES if on else property(lambda reducer: False)


def switched(switch, function, number, blocks):
    """Return the median times of calls with a part and without, and the median ratio of neighboring blocks."""

    def time_in_block(block):
        switch(block % 2 == 0)
        return median(function, number, 3)

    times = [time_in_block(block) for block in range(blocks)]
    ratios = [on / off for on, off in zip(times[::2], times[1::2], strict=True)]
    return statistics.median(times[::2]), statistics.median(times[1::2]), statistics.median(ratios)


def steps(dp, name):
    """Return what the vote costs the steps of a model; all ranks call it."""
    (loss, params, x), _ = MODELS[name]
    step = dp.value_and_grad(loss)
    return switched(vote, lambda: jax.block_until_ready(step(params, x)), *STEPS[name])


def main():
    me, found = jd.init(), {}
    if me.rank == 0:
        found["call"] = switched(search_on_both, lambda: jd.rpc_sync(1, echo, args=(np.ones(1, np.float32),)), *CALLS)
        search_on_both(True)
    jd.barrier()
    dp = jd.DataParallel()
    for name in STEPS:
        found[name] = steps(dp, name)
    if me.rank == 0:
        report(**found)
    jd.shutdown()


if __name__ == "__main__":
    main()
