"""Bundles without a transport: the functions a run calls, the values it keeps, and the data that travels."""

import dataclasses
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.autograd.callee.bundle import Bundle, CallStop, StopOutput
from jdistgrad.autograd.callee.run_bundle import BundleRun
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
    bundle = Bundle.of([stop] * len(functions), sources, [StopOutput(len(functions) - 1, 0)])
    return BundleRun(Cached(bundle), list(functions), [()] * len(functions), (), [X])


def test_functions_run_in_turn(worker):
    (found,) = run_of(jnp.exp, jnp.negative, jnp.tanh)()
    np.testing.assert_allclose(found, jnp.tanh(-jnp.exp(X)))


def test_what_nobody_needs_any_more_is_let_go(worker):
    seen = []

    def remember(x):
        gc.collect()
        alive.append(sum(one() is not None for one in seen))
        made = x + 1
        seen.append(weakref.ref(made))
        return made

    alive = []
    run_of(*[remember] * 6, stop=dataclasses.replace(STOP, references=True))()
    assert max(alive) == 1  # the argument of the running function


def test_numbers_stay_with_their_bundle(worker):
    # A run keeps an earlier result until the last stop that needs it, and a wanted result to the end.
    two = CallStop(Layout(((Hole(), Hole()), {}), ()), (), (), 1)
    bundle = Bundle.of(
        [STOP, STOP, two], [[0], [StopOutput(0, 0)], [StopOutput(0, 0), 1]], [StopOutput(2, 0), StopOutput(1, 0)]
    )
    found = BundleRun(Cached(bundle), [jnp.exp, jnp.negative, jnp.add], [()] * 3, (), [X, 2 * X])()
    np.testing.assert_allclose(found[0], jnp.exp(X) + 2 * X)
    np.testing.assert_allclose(found[1], -jnp.exp(X))


def test_a_bundle_is_decoded_once_and_its_functions_are_found_each_time(worker, monkeypatch):
    codec, one = PickleCodec(), run_of(change)
    parcels = [codec.encode(one, snapshot=True) for _ in range(2)]
    first = codec.decode(parcels[0])
    monkeypatch.setattr(sys.modules[__name__], "change", jax.jit(lambda x: 3 * x))
    second = codec.decode(parcels[1])
    assert first._bundle is second._bundle
    np.testing.assert_allclose([first()[0], second()[0]], [2 * X, 3 * X])
