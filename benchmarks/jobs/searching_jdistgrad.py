"""Job of surviving.py, with `--survive`: calls with and without the search for dead ranks, which both ranks switch."""

import pathlib
import statistics
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import median, report

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker

BLOCKS, CALLS = 300, 100


def echo(x):
    return x


def search(on):
    transport = current_worker().transport
    transport._progress._look = transport._look_beside_failures if on else transport._look


def call_in_block(number):
    """Return the time of a call in a block of calls; the search is on in every other block."""
    on = number % 2 == 0
    search(on)
    jd.rpc_sync(1, search, args=(on,))
    return median(lambda: jd.rpc_sync(1, echo, args=(np.ones(1, np.float32),)), CALLS, 0)


def main():
    me = jd.init()
    if me.rank == 0:
        times = [call_in_block(number) for number in range(BLOCKS)]
        ratios = [on / off for on, off in zip(times[::2], times[1::2], strict=True)]
        with_search, without = statistics.median(times[::2]), statistics.median(times[1::2])
        report(with_search=with_search, without=without, ratio=statistics.median(ratios))
    jd.shutdown()


if __name__ == "__main__":
    main()
