"""What the flight recorder costs a call: rank 0 measures calls to rank 1 with it and without it, in turn.

JDISTGRAD_DEBUG=1 jdistgrad run -n 2 benchmarks/jobs/recorder_jdistgrad.py
"""

import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from measure import few, report

import jdistgrad as jd
from jdistgrad import events
from jdistgrad.rpc.flight import recorder

TURNS, CALLS = few(300), few(100)


def echo(x):
    return x


def record(on):
    listener = recorder.current().record
    events.stop_listening(listener)
    if on:
        events.listen(listener)


def round_trip(array):
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        jd.rpc_sync(1, echo, args=(array,))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def in_flight(array):
    start = time.perf_counter()
    for future in [jd.rpc_async(1, echo, args=(array,)) for _ in range(CALLS)]:
        future.result()
    return (time.perf_counter() - start) / CALLS


def turn(on, array):
    record(on)
    jd.rpc_sync(1, record, args=(on,))
    return round_trip(array), in_flight(array)


def measure():
    array = np.ones(1, np.float32)
    turns = [(turn(False, array), turn(True, array)) for _ in range(TURNS)]
    for k, what in enumerate(("round_trip", "in_flight")):
        without, with_it = ([each[on][k] for each in turns] for on in (0, 1))
        quiet = [statistics.quantiles(times, n=10)[0] for times in (without, with_it)]  # other programs take turns too
        report(**{f"{what}_off": quiet[0], f"{what}_on": quiet[1], f"{what}_ratio": quiet[1] / quiet[0]})


def main():
    me = jd.init()
    if me.rank == 0:
        measure()
    jd.shutdown()


if __name__ == "__main__":
    main()
