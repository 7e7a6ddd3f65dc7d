"""The messages of a staged step: nothing is sent twice or without need, and operations share messages."""

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import X, mix
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.current import current_scope

pytestmark = pytest.mark.world(1, 3)


def recordings():
    scope = current_scope()
    return 0 if scope is None else scope.content(Tape).statistics()["recordings"]


@on_worker0
def test_unused_calls_are_not_made(world):
    def step(x):
        jd.rpc_sync(last(), mix, args=(x, x))
        return x.sum()

    assert jd.jit(step).plan(X).operations == []


@on_worker0
def test_what_was_pulled_for_the_last_time_is_forgotten(world):
    step = jd.jit(jd.grad(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum()))
    with jd.context():
        step(X)
        assert jd.rpc_sync(last(), recordings) == 0


def through_three(x, y):
    for function in (mix, jnp.add, jnp.multiply):
        x = jd.rpc_sync(last(), function, args=(x, y))
    return x.sum()


@on_worker0
def test_what_follows_on_one_worker_is_asked_for_in_one_message(world):
    def serial(x, y):
        return ((mix(x, y) + y) * y).sum()

    step = jd.jit(jd.value_and_grad(through_three, argnums=(0, 1)))
    step.plan(X, X + 1)  # traces the step, and the functions for their shapes
    with jd.context() as ctx, jd.timeline() as recorded:
        assert_close(step(X, X + 1), jax.value_and_grad(serial, argnums=(0, 1))(X, X + 1))
        assert jd.rpc_sync(last(), recordings) == 0
        pairs = [
            (link.what, link.backward) for link in ctx.tape.links.all() if link.source == 0 and link.answers is None
        ]
    assert len(pairs) == 6  # each call and each pullback has its place in the graph
    asked = [one.name for one in recorded.events if one.kind == "call" and "recordings" not in one.name]
    assert asked == [f"{mix.__module__}.mix, jax.numpy.add and 4 more"]


@pytest.mark.parametrize("function", [mix, jnp.multiply], ids=["jitted", "of JAX"])
@on_worker0
def test_a_large_cotangent_that_is_one_number_is_not_sent(world, function):
    large = jnp.linspace(-1, 1, 1 << 16).reshape(2, -1)
    step = jd.jit(jd.value_and_grad(lambda x: 2.5 * jd.rpc_sync(last(), function, args=(x, x)).sum()))
    assert_close(step(large)[1], jax.grad(lambda x: 2.5 * function(x, x).sum())(large))
    assert "broadcast" not in str(step.plan(large))
