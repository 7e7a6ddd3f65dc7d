"""Fetches of existing values and contributions to gradients: requests of a step to one worker share a message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X
from helpers.worlds import last, on_worker0

import jdistgrad as jd

pytestmark = pytest.mark.world(1, 3)


def scaled(factor):
    return factor * X


def nested(factor):
    return {"w": [factor * X, jnp.full((2, 1 << 15), factor)], "b": jnp.bfloat16(factor), "name": "nested"}


def made(function, *factors):
    references = [jd.remote(last(), function, args=(factor,)) for factor in factors]
    for one in references:
        one.creation().result()
    return references


def messages_of(run, function_name):
    """Return the number of calls of a function that are sent while ``run`` runs."""
    with jd.timeline() as recorded:
        run()
    return sum(function_name in one.name for one in recorded.events if one.kind == "call")


@on_worker0
def test_fetches_and_parts_of_gradients_share_a_message(world):
    a, b, c = made(scaled, 2.0, 3.0, 5.0)
    step = jd.jit(jd.value_and_grad(lambda a, b, c: (a.to_here() + b.to_here() + c.to_here()).sum(), (0, 1, 2)))
    step.plan(a, b, c)
    with jd.context():
        results = []
        count = messages_of(lambda: results.append(step(a, b, c)), "serve_requests")
        ((value, gradients),) = results
        assert_close(value, 10 * X.sum())
        assert_close([one.to_here() for one in gradients], [jnp.ones_like(X)] * 3)
    assert count == (0 if last() == 0 else 1)


@on_worker0
def test_gradients_that_depend_on_the_values_follow_together(world):
    a, b = made(scaled, 2.0, 3.0)
    step = jd.jit(jd.value_and_grad(lambda a, b: (a.to_here() * b.to_here()).sum(), (0, 1)))
    step.plan(a, b)
    with jd.context():
        results = []
        count = messages_of(lambda: results.append(step(a, b)), "serve_requests")
        ((_, gradients),) = results
        assert_close([one.to_here() for one in gradients], [3 * X, 2 * X])
    assert count == (0 if last() == 0 else 2)


@on_worker0
def test_values_of_any_kind_and_size(world):
    def loss(values):
        first, second = values
        return (first["w"][0] * second["w"][0]).sum() + (first["w"][1] ** 2).mean() + (first["b"] * second["b"]) ** 2

    a, b = made(nested, 2.0, 3.0)
    step = jd.jit(jd.value_and_grad(lambda a, b: loss((a.to_here(), b.to_here())), (0, 1)))
    for _ in range(2):
        with jd.context():
            value, gradients = step(a, b)
            local = [{key: one for key, one in nested(factor).items() if key != "name"} for factor in (2.0, 3.0)]
            expected, serial = jax.value_and_grad(loss)(local)
            assert_close(value, expected)
            found = [one.to_here() for one in gradients]
            assert_close([{key: one[key] for key in ("w", "b")} for one in found], serial)
            assert all(isinstance(leaf, jax.Array) for one in found for leaf in (*one["w"], one["b"]))


@on_worker0
def test_one_reference_fetched_twice(world):
    (a,) = made(scaled, 2.0)
    step = jd.jit(jd.grad(lambda a: (a.to_here() * a.to_here(timeout=30.0) + a.to_here()).sum()))
    with jd.context():
        assert_close(step(a).to_here(), 4 * X + 1)


@on_worker0
def test_parts_that_are_missing_stay_missing(world):
    # Only one of the arrays in the value is used: the gradients of the others are zero.
    (a,) = made(nested, 2.0)
    step = jd.jit(jd.grad(lambda a: a.to_here()["w"][0].sum()))
    with jd.context():
        gradient = step(a).to_here()
        assert_close(gradient["w"][0], jnp.ones_like(X))
        assert not np.any(np.asarray(gradient["w"][1]))
        assert gradient["w"][1].shape == (2, 1 << 15)
