"""The cost of a backward pass: nothing for unused results, one pull for a shared result; and sums that never vary."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.worlds import on_worker0, rank

import jdistgrad as jd
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.rpc.worker import current_worker

X = jnp.arange(1.0, 4.0)


def product(x, y):
    return x * y


def shared(x):
    return jnp.sin(x)


def links_here(context):
    table = current_worker().scopes
    return table.find(context).content(Tape).links.all() if context in table.identifiers() else []


def crossings(ctx):
    """Return the source, target, function name and direction of every message of a context, on all workers."""
    found = [link for k in range(jd.world_size()) for link in jd.rpc_sync(k, links_here, args=(ctx.id,))]
    return [(link.source, link.target, link.what.split(".")[-1], link.backward) for link in found]


def pulls(ctx, function):
    return [(source, target) for source, target, what, backward in crossings(ctx) if backward and function in what]


@on_worker0
def test_an_unused_call_costs_no_backward_message(world):
    def loss(x):
        jd.rpc_sync(rank(1), product, args=(x, x))
        jd.remote(rank(2), product, args=(x, x)).to_here()
        jd.remote(rank(1), product, args=(x, x))
        return jnp.sum(jd.rpc_sync(rank(2), shared, args=(x,)))

    with jd.context() as ctx:
        assert_close(jax.grad(loss)(X), jnp.cos(X))
        assert pulls(ctx, "product") == []
        assert pulls(ctx, "shared") == [(0, rank(2))]
        assert sum(backward for *_, backward in crossings(ctx)) == 1


@on_worker0
def test_nothing_goes_back_for_constants(world):
    with jd.context() as ctx:
        assert_close(jax.grad(lambda x: jd.rpc_sync(rank(1), product, args=(X, X)).sum() + x.sum())(X), jnp.ones(3))
        assert_close(jax.grad(lambda x: jd.rpc_sync(rank(1), jnp.argmax, args=(x,)) * x.sum())(X), 2 * jnp.ones(3))
        assert not any(backward for *_, backward in crossings(ctx))


def diamond(x):
    rref = jd.remote(rank(1), shared, args=(x,))
    left = jd.rpc_sync(rank(2), product, args=(rref, 2.0))
    right = jd.rpc_sync(rank(0), product, args=(rref, rref))
    jd.rpc_sync(rank(3), product, args=(rref, 5.0))
    return jnp.sum(left * right) + jnp.sum(rref.to_here())


def diamond_serially(x):
    return jnp.sum(2.0 * shared(x) ** 3) + jnp.sum(shared(x))


@on_worker0
def test_a_diamond_is_pulled_once(world):
    # The owner waits for as many contributions as the handle counts: one for each call, even if the call gets the
    # reference twice, and one for the fetch.
    with jd.context() as ctx:
        assert_close(jax.grad(diamond)(X), jax.grad(diamond_serially)(X))
        assert pulls(ctx, "shared") == [(0, rank(1))]
        assert sorted(pulls(ctx, "product")) == sorted([(0, rank(0)), (0, rank(2))])


@on_worker0
def test_as_many_contributions_as_uses(world):
    rref = jd.remote(rank(1), shared, args=(X,))
    with jd.context():
        used = lambda p: sum(jd.rpc_sync(rank(k), product, args=(p, X)).sum() for k in range(5))  # noqa: E731
        gradient = jd.grad(lambda p: used(p) + p.to_here().sum())(rref)
        assert gradient.parts == 6
        assert_close(gradient.to_here(), 5 * X + 1)


class passes:
    """The number of times that the derivative of ``watched`` has run in this process."""

    count = 0


@jax.custom_vjp
def watched(x):
    return x * 3


def count_pass(residuals, cotangent):
    passes.count += 1
    return (cotangent * 3,)


watched.defvjp(lambda x: (x * 3, None), count_pass)


def passes_here():
    return passes.count


def run_watched(x):
    return watched(x)


@pytest.mark.parametrize("uses", [0, 1, 5])
@on_worker0
def test_a_function_is_derived_once_however_often_it_is_used(world, uses):
    def loss(x):
        rref = jd.remote(rank(1), run_watched, args=(x,))
        return x.sum() + sum(jd.rpc_sync(rank(k), product, args=(rref, X)).sum() for k in range(uses))

    before = jd.rpc_sync(rank(1), passes_here)
    with jd.context():
        assert_close(jax.grad(loss)(X), 1 + 3 * uses * X)
    assert jd.rpc_sync(rank(1), passes_here) - before == min(uses, 1)


@jax.custom_vjp
def waits(x, delay, scale):
    return jnp.sin(x) * scale


def wait(residuals, cotangent):
    x, delay, scale = residuals
    time.sleep(float(delay))
    return jnp.cos(x) * scale * cotangent, None, None


waits.defvjp(lambda x, delay, scale: (jnp.sin(x) * scale, (x, delay, scale)), wait)


def late(x, delay, scale):
    return waits(x, delay, scale)


def test_sums_are_the_same_to_the_bit_whoever_comes_first(world):
    # The delays change the order of arrival, and the scales make sums depend on the order of addition.

    def body():
        found = set()
        for delays in ([0.02, 0.01, 0.0], [0.0, 0.01, 0.02], [0.01, 0.0, 0.02], [0.0, 0.0, 0.0]):
            rref = jd.remote(rank(1), shared, args=(X / 3,))
            with jd.context():
                loss = lambda p: sum(futures(p, delays))  # noqa: B023, E731
                found.add(np.asarray(jd.grad(loss)(rref).to_here()).tobytes())
        assert len(found) == 1

    def futures(p, delays):
        started = [jd.rpc_async(rank(k), late, args=(p, delay, 10.0 ** (4 * k))) for k, delay in enumerate(delays)]
        return [one.result().sum() for one in started]

    world.drive(body)


@on_worker0
def test_a_repeated_pullback_counts_once_for_references(world):
    # A second derivative runs the pullback again: its earlier contributions to owners must not be added twice.
    rref = jd.remote(rank(1), shared, args=(X,))
    with jd.context():
        inner = lambda p, x: jd.rpc_sync(rank(2), product, args=(p, x**2)).sum()  # noqa: E731
        jax.grad(lambda x: jax.grad(inner, argnums=1)(rref, x).sum())(X)
        gradient = jd.grad(inner)(rref, X)
        assert_close(gradient.to_here(), X**2)


def held_here(context):
    return current_worker().scopes.find(context).content(Tape).statistics()["recordings"]


@on_worker0
def test_what_is_recorded_is_kept_until_the_context_ends(world):
    with jd.context() as ctx:
        _, pullback = jax.vjp(lambda x: jd.rpc_sync(rank(1), product, args=(x, x)), X)
        assert jd.rpc_sync(rank(1), held_here, args=(ctx.id,)) == 1
        for _ in range(3):
            assert_close(pullback(X), (2 * X**2,))
        assert jd.rpc_sync(rank(1), held_here, args=(ctx.id,)) == 1
