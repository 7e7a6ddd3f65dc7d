"""Functions with custom rules that are not their derivatives: every order must be what JAX computes in one process."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close, sum_squares
from helpers.programs import handed_on, serial, sync
from helpers.worlds import on_worker0, rank

import jdistgrad as jd

X, Y = jnp.array([0.3, -1.2, 2.0]), jnp.array([0.5, -0.7])


@jax.custom_vjp
def reversal(x, y):
    """Return sin(x) * sum(y); the forward rule computes another function, and the backward rule reverses gradients."""
    return jnp.sin(x) * y.sum()


reversal.defvjp(
    lambda x, y: (jnp.sin(x) * y.sum() ** 2, (x, y)),
    lambda kept, g: (-3 * g * kept[0], jnp.full(2, 5.0) * (g * kept[1].prod()).sum()),
)


@jax.custom_vjp
def clipped(x):
    return x**3


clipped.defvjp(lambda x: (x**3, x), lambda x, g: (jnp.clip(g, -1.0, 1.0) * x,))


@jax.custom_vjp
def straight_through(x):
    return jnp.round(4 * x) / 4


straight_through.defvjp(lambda x: (jnp.round(4 * x) / 4, None), lambda _, g: (g,))


def mixed(x, y):
    h = reversal(x, y) + clipped(x)
    return {"out": straight_through(h) * h, "side": reversal(h, y * 2)}


fast_mixed = jax.jit(mixed)


def zeroth(call, function):
    def loss(x, y):
        first = call(1, function, x, y)
        return sum_squares(call(2, function, first["out"] * 0.1, jnp.stack([first["side"].sum() * 0.1, y[0]])))

    return loss


def orders(call, function=mixed):
    """Return the first three derivatives. In the higher ones, the first is by ``x``, and the second by ``y``."""
    loss = zeroth(call, function)
    first = jax.grad(loss, argnums=0)
    second = jax.grad(lambda x, y: sum_squares(first(x, y)), argnums=1)
    third = jax.grad(lambda x, y: sum_squares(second(x, y)) + jnp.sin(x).sum(), argnums=(0, 1))
    return [jax.grad(loss, argnums=(0, 1)), second, third]


@functools.cache
def expected():
    return [jax.jit(derivative)(X, Y) for derivative in orders(serial)]


def assert_each_order_is_right(found, highest=2):
    for order, (derivative, right) in enumerate(zip(found[:highest], expected()[:highest], strict=True)):
        with jd.context():
            assert_close(derivative(X, Y), right, rtol=1e-4 * 10**order, atol=1e-4)


@pytest.mark.parametrize(("way", "function"), [(sync, mixed), (handed_on, mixed), (sync, fast_mixed)])
def test_each_order_is_that_of_the_rule(big_world, way, function):
    highest = 3 if (way, function) == (sync, mixed) else 2
    big_world.drive(lambda: assert_each_order_is_right(orders(way, function), highest))


@pytest.mark.parametrize(("compiled", "way"), [(jax.jit, sync), (jd.jit, handed_on)], ids=["jax.jit", "jd.jit"])
def test_compiled_too(big_world, way, compiled):
    big_world.drive(lambda: assert_each_order_is_right([*map(compiled, orders(way))]))


def curvature(call):
    """Return a function that takes second derivatives in a batch and differentiates them once more."""

    def each(x, y):
        return jax.grad(lambda x: sum_squares(jax.grad(lambda x: sum_squares(call(1, reversal, x, y)))(x)))(x)

    return jax.grad(lambda xs, y: (jax.vmap(each, (0, None))(xs, y) * xs).sum(), argnums=(0, 1))


@on_worker0
def test_in_a_batch(big_world):
    xs = jnp.stack([X, X / 2, X - 0.1, 2 * X]) / 3
    with jd.context():
        assert_close(curvature(sync)(xs, Y), curvature(serial)(xs, Y), rtol=1e-3)


def weighted(value, x):
    return jnp.sum(value * x)


def weighted_on(k):
    return lambda value, x: jd.rpc_sync(rank(k), weighted, args=(value, x))


def through_a_rule(change):
    """Return a call's function whose custom rule changes the gradient of a reference that the call has."""
    ruled = jax.custom_vjp(weighted_on(2))

    def backward(pull, cotangent):
        of_value, of_x = pull(cotangent)
        return jax.tree.map(change, of_value), of_x

    ruled.defvjp(lambda value, x: jax.vjp(weighted_on(2), value, x), backward)
    return ruled


@pytest.mark.parametrize(
    "change",
    [lambda g: 0.5 * g, lambda g: g + g, lambda g: jnp.clip(g, -1.0, 1.0)],
    ids=["halved", "doubled", "clipped"],
)
@on_worker0
def test_what_a_rule_around_a_call_makes_of_the_gradient_of_a_reference_is_not_fetched(big_world, change):
    # What the call contributed is on the owner, unchanged: it would be fetched as if there were no rule.
    value = jd.remote(rank(1), jnp.negative, args=(X,))
    with jd.context():
        plain = jd.grad(weighted_on(1))(value, X)
        for made in (lambda: jd.grad(through_a_rule(change))(value, X), lambda: jax.tree.map(change, plain)):
            with pytest.raises(TypeError, match="leaf of a reference"):
                made()
        assert_close(plain.to_here(), X)


@on_worker0
def test_gradients_of_several_passes_that_are_added_are_fetched(big_world):
    value, xs = jd.remote(rank(1), jnp.negative, args=(X,)), jnp.arange(12.0).reshape(4, 3)
    batched = lambda value: jax.vmap(weighted_on(2), in_axes=(None, 0))(value, xs).sum()  # noqa: E731
    with jd.context():
        one, other = jd.grad(weighted_on(1))(value, X), jd.grad(batched)(value)
        both = jax.tree.map(operator.add, one, other)
        assert_close([each.to_here() for each in (one, other, both)], [X, xs.sum(0), X + xs.sum(0)])


def second_of_reference(call):
    def loss(value, x):
        inner = jax.grad(lambda x: sum_squares(call(2, mixed, x, value)))(x)
        return sum_squares(inner)

    return loss


@on_worker0
def test_a_reference_that_only_the_outer_derivative_is_of(big_world):
    # The inner derivative is by the array ``x`` alone; only the outer derivative is by the reference too.
    value = jd.remote(rank(1), jnp.negative, args=(Y,))
    with jd.context():
        gradient, found = jd.grad(second_of_reference(sync), argnums=(0, 1))(value, X)
        expected, other = jax.grad(second_of_reference(serial), argnums=(0, 1))(-Y, X)
        assert_close((gradient.to_here(), found), (expected, other), rtol=1e-3, atol=1e-4)


@on_worker0
def test_a_pullback_that_outlives_the_derivative_it_was_made_in(big_world):
    # The pullback must be that of the function, not of the function's forward rule.

    def pullbacks(call):
        def inner(x):
            return jax.vjp(lambda x: call(1, clipped, x), x)

        value, outer, kept = jax.vjp(inner, X, has_aux=True)
        return value, outer(X + 1), kept(X + 1)

    with jd.context():
        assert_close(pullbacks(sync), pullbacks(serial))
