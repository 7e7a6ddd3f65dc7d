"""Bundles on the callee: the stops of a message, in turn or compiled together."""

import dataclasses
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.autograd.callee.bundle import KEPT, Bundle, BundleRun, StopOutput
from jdistgrad.autograd.callee.recording import CallStop, LinearStop
from jdistgrad.autograd.values.holes import Hole, Layout
from jdistgrad.rpc.by_value import Cached
from jdistgrad.rpc.codec import PickleCodec

X = np.ones(3, np.float32)
STOP = CallStop(Layout(((Hole(),), {}), ()), (), (), 1)


@pytest.fixture
def worker():
    with jd.local_workers(1):
        yield


@jax.jit
def change(x):
    return 2 * x


def run_of(*functions, stop=STOP):
    """Return a run of a bundle of calls, each on the result of the call before."""
    sources = [[0], *([StopOutput(turn, 0)] for turn in range(len(functions) - 1))]
    bundle = Bundle([stop] * len(functions), sources, [StopOutput(len(functions) - 1, 0)])
    return BundleRun(Cached(bundle), list(functions), [()] * len(functions), ())


def test_what_nobody_needs_any_more_is_let_go(worker):
    seen = []

    def remember(x):
        gc.collect()
        alive.append(sum(one() is not None for one in seen))
        made = x + 1
        seen.append(weakref.ref(made))
        return made

    alive = []
    run_of(*[remember] * 6, stop=dataclasses.replace(STOP, is_closed=False))([X])
    assert max(alive) == 1  # the argument of the running function


def test_a_bundle_is_decoded_once_and_its_functions_are_found_each_time(worker, monkeypatch):
    codec, one = PickleCodec(), run_of(change)
    parcels = [codec.encode(one, snapshot=True) for _ in range(2)]
    first = codec.decode(parcels[0])
    monkeypatch.setattr(sys.modules[__name__], "change", jax.jit(lambda x: 3 * x))
    second = codec.decode(parcels[1])
    assert first.bundle is second.bundle
    np.testing.assert_allclose([first([X])[0], second([X])[0]], [2 * X, 3 * X])


SPREAD = np.linspace(-1, 1, 5, dtype=np.float32)
ONE = Layout(((Hole(),), {}), ())
CALL = CallStop(ONE, (), (), 1)
RECORDED = CallStop(ONE, ((0,),), (), 1)


def pull(call, *, last=True):
    return LinearStop("something", 0, (0,), (), last, call=call)


def forward_and_back(**settings):
    """Return a bundle of two recorded calls and their pullbacks, from x and a cotangent to a result and a gradient."""
    stops = [RECORDED, RECORDED, pull(1, **settings), pull(0, **settings)]
    return Bundle(stops, [[0], [StopOutput(0, 0)], [1], [StopOutput(2, 0)]], [StopOutput(1, 0), StopOutput(3, 0)])


def test_calls_and_their_pullbacks_are_one_function():
    traces = []

    @jax.jit
    def cube(x):
        traces.append(x)
        return x**3

    bundle = forward_and_back()
    for scale in (1, 2, 3):
        value, gradient = bundle.at_once([jnp.sin, cube, None, None], [scale * SPREAD, SPREAD])
        expected, pullback = jax.vjp(lambda x: jnp.sin(x) ** 3, scale * SPREAD)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, pullback(SPREAD)[0], rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "bundle",
    [
        forward_and_back(last=False),
        Bundle([RECORDED], [[0]], [StopOutput(0, 0)]),
        Bundle([pull(None)], [[0]], [StopOutput(0, 0)]),
        Bundle([CallStop(ONE, (), (), 1, is_closed=False)], [[0]], [StopOutput(0, 0)]),
    ],
    ids=["pulled again later", "pulled elsewhere", "recorded before", "references"],
)
def test_what_leaves_something_behind_is_not_closed(bundle):
    assert not bundle.is_closed


def calls_somebody(x):
    return jd.rpc_sync(0, jnp.sin, args=(x,))


def prints(x):
    jax.debug.print("{}", x)
    return x


def looks(x):
    return x if x[0] > 0 else -x


@pytest.mark.parametrize("function", [calls_somebody, prints, looks])
def test_what_does_more_than_compute_goes_stop_by_stop(function):
    with jd.local_workers(1):
        assert Bundle([CALL], [[0]], [StopOutput(0, 0)]).at_once([function], [SPREAD]) is None


def test_outputs_that_are_inputs_are_no_copies():
    x = jnp.asarray(SPREAD)
    bundle = Bundle([CALL, CALL], [[0], [1]], [StopOutput(0, 0), StopOutput(1, 0)])
    same, other = bundle.at_once([lambda x: x, jnp.sin], [x, x])
    assert same is x
    np.testing.assert_allclose(other, jnp.sin(x))


def test_functions_that_are_ever_different_ones_are_not_compiled_for_ever():
    bundle = Bundle([CALL], [[0]], [StopOutput(0, 0)])
    functions = [jax.jit(lambda x, k=k: x + k) for k in range(KEPT + 1)]
    found = [bundle.at_once([function], [SPREAD]) for function in functions]
    assert [one is None for one in found] == [False] * KEPT + [True]


def test_functions_are_let_go_with_their_bundle():
    bundle = Bundle([CALL], [[0]], [StopOutput(0, 0)])
    function = jax.jit(lambda x: x + 1)
    alive = weakref.ref(function)
    bundle.at_once([function], [SPREAD])
    del bundle, function
    gc.collect()
    assert alive() is None


def test_each_shape_is_looked_at():
    # A function that can be compiled for one shape may print or raise for another.

    def picky(x):
        if x.size == 2:
            raise ValueError("no pairs")
        if x.size == 3:
            jax.debug.print("{}", x)
        return x * 2

    bundle = Bundle([CALL], [[0]], [StopOutput(0, 0)])
    found = [bundle.at_once([picky], [np.ones(size, np.float32)]) for size in (2, 3, 4, 3, 2, 4)]
    assert [one is None for one in found] == [True, True, False, True, True, False]
