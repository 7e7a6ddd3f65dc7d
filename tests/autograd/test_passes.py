"""Backward passes: the context they run in, and the gradients they gather in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import X, square
from helpers.worlds import (
    gradients_here,
    holders,
    make_weights,
    on_worker0,
    rank,
    relay,
    scaled,
    wait_until_nobody_takes_part,
)

import jdistgrad as jd

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_gradients_are_held_by_the_owners(world):
    rrefs = [jd.remote(rank(k), make_weights, args=(k,)) for k in range(3)]
    loss = lambda *ps: sum(jd.rpc_sync(rank(k + 1), scaled, args=(p, X)).sum() * k for k, p in enumerate(ps))  # noqa: E731
    with jd.context() as ctx:
        jd.grad(loss, argnums=(0, 1, 2))(*rrefs)
        found = {}
        for owner in range(jd.world_size()):
            found.update(jd.rpc_sync(owner, gradients_here, args=(ctx.id,)))
        for k in (1, 2):
            gradient = found.pop(rrefs[k].id)
            np.testing.assert_array_equal(gradient["w"], k * X)
            assert gradient["n"] is None  # an integer has no gradient
        assert found.keys() <= {rrefs[0].id}
        assert {rref.owner.rank for rref in jd.get_gradients(ctx)} <= {0}


@on_worker0
def test_value_and_grad_opens_a_context_and_closes_it(world):
    value, gradient = jd.value_and_grad(lambda x: relay([rank(1), rank(2)], x).sum())(X)
    assert_close((value, gradient), (jnp.sum(X**2), 2 * X))
    wait_until_nobody_takes_part()
    assert_close(jd.grad(lambda x: relay([rank(1)], x).sum())(X), 2 * X)
    wait_until_nobody_takes_part()


@on_worker0
def test_gradients_of_references_keep_the_context_they_need(world):
    rref = jd.remote(rank(1), make_weights, args=(2,))
    gradient = jd.grad(lambda p: jd.rpc_sync(rank(2), scaled, args=(p, X)).sum())(rref)
    assert holders() >= {0, rank(1)}
    np.testing.assert_array_equal(gradient.to_here()["w"], X)
    del gradient
    wait_until_nobody_takes_part()


@on_worker0
def test_an_error_in_value_and_grad_closes_its_context(world):
    with pytest.raises(TypeError):
        jd.grad(lambda x: jd.rpc_sync(rank(1), relay, args=(x, None, "too many")))(X)
    wait_until_nobody_takes_part()


@on_worker0
def test_references_in_plain_grad_need_a_context(world):
    with pytest.raises(jd.ContextError, match=r"programs\.square.*outside any context.*value_and_grad"):
        jax.grad(lambda x: jd.remote(rank(1), square, args=(x,)).to_here().sum())(X)
    assert holders() == set()
    assert_close(jax.jit(lambda x: jd.rpc_sync(rank(1), square, args=(x,)))(X), X**2)  # no derivative, so no context


@on_worker0
def test_backward_gathers_gradients_in_its_context(world):
    rref = jd.remote(rank(1), make_weights, args=(2,))
    with jd.context() as ctx:
        loss, (of_p, of_x) = jd.backward(ctx, lambda p, x: jd.rpc_sync(rank(2), scaled, args=(p, x)).sum(), rref, X)
        assert_close((loss, of_x), (jnp.sum((jnp.arange(3.0) + 2) * X) + 6, jnp.arange(3.0) + 2))
        np.testing.assert_array_equal(of_p.to_here()["w"], X)


@on_worker0
def test_backward_returns_none_for_what_is_not_differentiated(world):
    # As gradients of references do. The value itself in its place would look like a gradient.
    def loss(p, labels, scale):
        return jnp.sum(p["w"] * labels) * p["n"] * scale

    with jd.context() as ctx:
        _, gradients = jd.backward(ctx, loss, {"w": X, "n": 3, "name": "p"}, jnp.arange(3), 0.5)
    of_p, of_labels, of_scale = gradients
    assert_close((of_p["w"], of_scale), (1.5 * jnp.arange(3), 3 * jnp.sum(X * jnp.arange(3))))
    assert (of_p["n"], of_p["name"], of_labels) == (None, None, None)


@on_worker0
def test_several_roots(world):
    def roots(x):
        return [jd.rpc_sync(rank(k), square, args=(x * (k + 1),)).sum() for k in range(4)]

    with jd.context() as ctx:
        values, (gradient,) = jd.backward(ctx, roots, X)
    assert_close(values, [jnp.sum(((k + 1) * X) ** 2) for k in range(4)])
    assert_close(gradient, 2 * (1 + 4 + 9 + 16) * X)


@on_worker0
def test_two_passes_add_up(world):
    # Gradients of references add up in the context; those that are returned are of one pass, as in JAX.
    rref = jd.remote(rank(1), make_weights, args=(2,))
    loss = lambda p, x: jd.rpc_sync(rank(2), nested_scaled, args=(jd.by_reference(p), x)).sum()  # noqa: E731
    with jd.context() as ctx:
        for turn in (1, 2, 3):
            _, (of_p, of_x) = jd.backward(ctx, loss, rref, X)
            np.testing.assert_array_equal(of_p.to_here()["w"], X)
            total = jd.rpc_sync(rank(1), gradients_here, args=(ctx.id,))
            np.testing.assert_array_equal(total[rref.id]["w"], turn * X)
            assert_close(of_x, jnp.arange(3.0) + 2)
    with jd.context() as ctx:
        np.testing.assert_array_equal(jd.backward(ctx, loss, rref, X)[1][0].to_here()["w"], X)


@pytest.mark.parametrize("jit", [jd.jit, jax.jit], ids=["jd.jit", "jax.jit"])
@on_worker0
def test_two_passes_at_the_same_time_through_one_reference(big_world, jit):
    # Neither pass needs the other's result, so equally many contributions of both reach the owner in any order.

    def program(call, remote):
        def loss(x):
            kept = remote(1, jnp.sin, x)
            return call(0, jnp.multiply, kept, x), call(2, jnp.add, kept, x * x)

        def both(x, one, other):
            _, pull = jax.vjp(loss, x)
            return pull(one), pull(other)

        return both

    remotely = program(
        lambda to, f, *args: jd.rpc_sync(to, f, args=args), lambda to, f, *args: jd.remote(to, f, args=args)
    )
    serially = program(lambda to, f, *args: f(*args), lambda to, f, *args: f(*args))
    x = jnp.arange(1.0, 5.0)
    step = jit(remotely)
    for k in range(8):
        one, other = (x + k, 2 * x), (x * x, x - k)
        with jd.context():
            found = jax.block_until_ready(step(x, one, other))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, serially(x, one, other))


def nested_scaled(p, x):
    return jd.rpc_sync(rank(0), scaled, args=(p, x))


@on_worker0
def test_backward_without_calls(world):
    with jd.context() as ctx:
        assert_close(jd.backward(ctx.id, lambda x: jnp.sum(x**2), X), (jnp.sum(X**2), (2 * X,)))


@on_worker0
def test_one_parameter_used_by_all_workers_at_once(world):
    # Every worker runs its own passes over worker 0's value.
    rref = jd.RRef(make_weights(3))
    futures = [jd.rpc_async(k, pass_over, args=(jd.by_reference(rref), X * (k + 1))) for k in range(jd.world_size())]
    for k, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(), X * (k + 1))
    wait_until_nobody_takes_part()


def pass_over(rref, x):
    found = []
    for _ in range(4):
        with jd.context():
            gradient = jd.grad(lambda p: jd.rpc_sync(0, scaled, args=(p, x)).sum())(rref)
            found.append(gradient.to_here()["w"])
    assert all((one == found[0]).all() for one in found)
    return found[0]
