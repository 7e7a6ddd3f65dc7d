"""Random graphs of calls and references over three workers: values as in a serial program, and no leftovers.

The graph is drawn as a list of steps that a small interpreter runs twice: with remote calls, and with none.
"""

import numpy as np
from hypothesis import HealthCheck, given, settings, strategies as st

import jdistgrad as jd

WORKERS = 3
VALUES = st.integers(0, 30)  # index of an earlier value, taken modulo the number of values
RANKS = st.integers(0, WORKERS - 1)

STEPS = st.one_of(
    st.tuples(st.just("call"), RANKS, VALUES, VALUES),
    st.tuples(st.just("relay"), st.lists(RANKS, min_size=1, max_size=4), VALUES, VALUES),
    st.tuples(st.just("remote"), RANKS, VALUES, VALUES),
    st.tuples(st.just("own"), VALUES),
    st.tuples(st.just("pass_on"), st.lists(RANKS, min_size=1, max_size=4), VALUES),
    st.tuples(st.just("fetch"), VALUES),
    st.tuples(st.just("at_once"), st.lists(RANKS, min_size=1, max_size=5), VALUES),
    st.tuples(st.just("drop"), VALUES),
)


def combine(a, b):
    """Combine two arrays of any sizes into an array of the larger size."""
    n = max(a.size, b.size)
    return np.resize(a, n + 1)[:n] * 3 + np.resize(b, n)


def relay(path, a, b):
    return jd.rpc_sync(path[0], relay, args=(path[1:], a, b)) if path else combine(a, b)


def hand_on(path, reference):
    if not path:
        return reference
    return jd.rpc_sync(path[0], hand_on, args=(path[1:], jd.by_reference(reference)))


def run(steps, calls):
    """Run a program of these steps; return its values at the end. The methods of ``calls`` make the steps."""
    values = [np.arange(1.0 + k) for k in range(3)]
    for name, *details in steps:
        getattr(calls, name)(values, *details)
    return [calls.local(value) for value in values]


class Serial:
    def local(self, value):
        return value

    def call(self, values, rank, a, b):
        values.append(combine(values[a % len(values)], values[b % len(values)]))

    remote = call
    relay = call

    def own(self, values, a):
        values.append(values[a % len(values)])

    def pass_on(self, values, path, a):
        values.append(values[a % len(values)])

    def fetch(self, values, a):
        values.append(values[a % len(values)])

    def at_once(self, values, ranks, a):
        value = values[a % len(values)]
        values.extend(combine(value, np.ones(rank + 1)) for rank in ranks)

    def drop(self, values, a):
        if len(values) > 1:
            del values[a % len(values)]


class Remote(Serial):
    """Steps made with remote calls. Values may be arrays or references to arrays."""

    def local(self, value):
        return value.to_here() if isinstance(value, jd.RRef) else value

    def call(self, values, rank, a, b):
        values.append(jd.rpc_sync(rank, combine, args=(values[a % len(values)], values[b % len(values)])))

    def relay(self, values, path, a, b):
        values.append(jd.rpc_sync(path[0], relay, args=(path[1:], values[a % len(values)], values[b % len(values)])))

    def remote(self, values, rank, a, b):
        values.append(jd.remote(rank, combine, args=(values[a % len(values)], values[b % len(values)])))

    def own(self, values, a):
        value = values[a % len(values)]
        values.append(value if isinstance(value, jd.RRef) else jd.RRef(value))

    def pass_on(self, values, path, a):
        value = values[a % len(values)]
        values.append(hand_on(path, value) if isinstance(value, jd.RRef) else value)

    def fetch(self, values, a):
        values.append(self.local(values[a % len(values)]))

    def at_once(self, values, ranks, a):
        value = values[a % len(values)]
        futures = [jd.rpc_async(rank, combine, args=(value, np.ones(rank + 1))) for rank in ranks]
        values.extend(future.result() for future in futures)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(STEPS, max_size=25))
def check_program(steps):
    for expected, found in zip(run(steps, Serial()), run(steps, Remote()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_random_programs(big_world):
    """All programs run in one world: at its end, entries that any of them left in a table would be found."""
    big_world.drive(check_program)
