"""Closed routes as one compiled function, without any wire."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.autograd.layout import Hole, Layout
from jdistgrad.autograd.routes import CallStop, Made, PullStop, Route
from jdistgrad.autograd.whole import VARIANTS, at_once

X = np.linspace(-1, 1, 5, dtype=np.float32)
ONE = Layout(((Hole(),), {}), ())
CALL = CallStop(ONE, None, (), 1)
RECORDED = CallStop(ONE, (0,), (), 1)


def pull(call, *, last=True):
    return PullStop("something", (0,), (0,), last, (), call)


def forward_and_back(**settings):
    """Two recorded calls and both their pullbacks: of x and a cotangent, to a result and a gradient."""
    stops = [RECORDED, RECORDED, pull(1, **settings), pull(0, **settings)]
    return Route.of(stops, [[0], [Made(0, 0)], [1], [Made(2, 0)]], [Made(1, 0), Made(3, 0)])


def test_calls_and_their_pullbacks_are_one_function():
    traces = []

    @jax.jit
    def cube(x):
        traces.append(x)
        return x**3

    route = forward_and_back()
    for scale in (1, 2, 3):
        value, gradient = at_once(route, [jnp.sin, cube, None, None], [scale * X, X])
        expected, pullback = jax.vjp(lambda x: jnp.sin(x) ** 3, scale * X)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient, pullback(X)[0], rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    "route",
    [
        forward_and_back(last=False),
        Route.of([RECORDED], [[0]], [Made(0, 0)]),
        Route.of([pull(None)], [[0]], [Made(0, 0)]),
        Route.of([CallStop(ONE, None, (), 1, references=True)], [[0]], [Made(0, 0)]),
    ],
    ids=["pulled again later", "pulled elsewhere", "recorded before", "references"],
)
def test_what_leaves_something_behind_is_not_closed(route):
    assert not route.is_closed


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
        assert at_once(Route.of([CALL], [[0]], [Made(0, 0)]), [function], [X]) is None


def test_outputs_that_are_inputs_are_no_copies():
    x = jnp.asarray(X)
    route = Route.of([CALL, CALL], [[0], [1]], [Made(0, 0), Made(1, 0)])
    same, other = at_once(route, [lambda x: x, jnp.sin], [x, x])
    assert same is x
    np.testing.assert_allclose(other, jnp.sin(x))


def test_functions_that_are_ever_different_ones_are_not_compiled_for_ever():
    route = Route.of([CALL], [[0]], [Made(0, 0)])
    functions = [jax.jit(lambda x, k=k: x + k) for k in range(VARIANTS + 1)]
    found = [at_once(route, [function], [X]) for function in functions]
    assert [one is None for one in found] == [False] * VARIANTS + [True]
