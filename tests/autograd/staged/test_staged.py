"""The staged step, compared with the serial program."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import X, affine, as_written, make_params, mix
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.rpc.current import within

pytestmark = pytest.mark.world(1, 3)


@pytest.mark.parametrize("function", [mix, as_written, jnp.multiply], ids=["jitted", "as written", "of JAX"])
@on_worker0
def test_gradients_equal_the_serial_ones(world, function):
    def distributed(x, y):
        return (jd.rpc_sync(last(), function, args=(x, y)) * y).sum()

    def serial(x, y):
        return (function(x, y) * y).sum()

    step = jd.jit(jd.value_and_grad(distributed, argnums=(0, 1)))
    for shift in (1.0, 2.0):
        assert_close(step(X, X * shift), jax.value_and_grad(serial, argnums=(0, 1))(X, X * shift))


@on_worker0
def test_parameters_that_stay_on_their_owners(world):
    params = jd.remote(last(), make_params, args=(3,))

    def loss(params, x):
        return (jd.rpc_sync(0, affine, args=(params, x)) ** 2).sum()

    step = jd.jit(jd.value_and_grad(loss, argnums=(0, 1)))
    expected = jax.value_and_grad(lambda p, x: (affine(p, x) ** 2).sum(), argnums=(0, 1))(params.to_here(), X)
    with jd.context():
        value, (of_params, of_x) = step(params, X)
        assert_close((value, (of_params.to_here(), of_x)), expected)
    value, (of_params, _) = step(params, X)  # opens its own context
    assert_close(of_params.to_here(), expected[1][0])
    del of_params


@on_worker0
def test_values_that_are_made_during_the_step(world):
    def distributed(x):
        made = jd.remote(last(), mix, args=(x, x))
        there = jd.rpc_sync(0, mix, args=(made, x))
        return (there * made.to_here()).sum()

    def serial(x):
        made = mix(x, x)
        return (mix(made, x) * made).sum()

    with jd.context():
        assert_close(jd.jit(jd.value_and_grad(distributed))(X), jax.value_and_grad(serial)(X))
        twice = [jax.grad(lambda x, f=f: jax.grad(f)(x).sum()) for f in (distributed, serial)]
        assert_close(jd.jit(twice[0])(X), twice[1](X))


@on_worker0
def test_scan_and_cond_with_calls_inside(world):
    def distributed(x):
        def turn(carry, k):
            return jax.lax.cond(
                k % 2 == 0, lambda c: jd.rpc_sync(last(), mix, args=(c, x)), lambda c: c * 0.5, carry
            ), carry.sum()

        return jax.lax.scan(turn, x, jnp.arange(4))[0].sum()

    def serial(x):
        for k in range(4):
            carry = x if k == 0 else carry  # noqa: F821 set in the first iteration
            carry = mix(carry, x) if k % 2 == 0 else carry * 0.5
        return carry.sum()

    step, expected = jd.jit(jd.value_and_grad(distributed)), jax.value_and_grad(serial)(X)
    assert_close(step(X), expected)  # in a context of its own
    with jd.context():
        assert_close(step(X), expected)


@on_worker0
def test_the_gradient_of_a_reference_that_a_scan_uses_belongs_to_a_context_of_its_own(world):
    params = jd.remote(last(), make_params, args=(1,))

    def loss(params, call):
        return jax.lax.scan(lambda c, k: (call(params, X * c).sum() * k, None), 1.0, jnp.arange(1.0, 4.0))[0]

    def remotely(params, x):
        return jd.rpc_sync(last(), affine, args=(params, x))

    value, gradient = jd.jit(jd.value_and_grad(functools.partial(loss, call=remotely)))(params)
    expected = jax.value_and_grad(functools.partial(loss, call=affine))(make_params(1))
    assert_close((value, gradient.to_here()), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["no context", "another context"])
@on_worker0
def test_a_pullback_from_outside_belongs_to_the_context_it_was_recorded_in(world, inside):
    with jd.context():
        _, pullback = jax.vjp(lambda x: jd.rpc_sync(last(), mix, args=(x, x)), X)
        staged = jd.jit(lambda pullback, cotangent: pullback(cotangent))
        with within(None), jd.context() if inside else contextlib.nullcontext():
            (found,) = staged(pullback, X)
    assert_close(found, X * (jnp.cos(X) * X + jnp.sin(X)))


@on_worker0
def test_calls_of_which_everything_is_known_at_trace_time(world):
    constant = jnp.full(3, 2.0)

    def program(x):
        known = jd.rpc_sync(last(), mix, args=(jnp.ones(3), constant))
        return known @ x + jd.rpc_sync(last(), jnp.sin, args=(2.0,))

    value, gradient = jd.jit(jd.value_and_grad(program))(X)
    assert_close(gradient, mix(jnp.ones(3), constant))
    assert_close(value, gradient @ X + jnp.sin(2.0))


@on_worker0
def test_a_row_with_references_and_second_derivatives(world):
    def program(params, x):
        hidden = jd.rpc_sync(last(), affine, args=(params, x))
        return jd.rpc_sync(last(), jnp.tanh, args=(hidden,)).sum()

    def serial(params, x):
        return jnp.tanh(affine(params, x)).sum()

    params = jd.remote(last(), make_params, args=(3,))
    values = params.to_here()
    with jd.context():
        _, (of_params, of_x) = jd.jit(jd.value_and_grad(program, argnums=(0, 1)))(params, X)
        assert_close((of_params.to_here(), of_x), jax.grad(serial, argnums=(0, 1))(values, X))
        hessian = jd.jit(jax.jacrev(jax.grad(program, argnums=1), argnums=1))(params, X)
        assert_close(hessian, jax.jacrev(jax.grad(serial, argnums=1), argnums=1)(values, X))


@on_worker0
def test_under_a_transformation_it_is_the_function_itself(world):
    staged = jd.jit(lambda x: jd.rpc_sync(last(), mix, args=(x, x)).sum())
    with jd.context():
        assert_close(jax.grad(staged)(X), jax.grad(lambda x: mix(x, x).sum())(X))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    scale: Any

    @jd.jit
    def call(self, x):
        return jd.rpc_sync(last(), mix, args=(self.scale, x))


@on_worker0
def test_a_method(world):
    for scale in (2.0, X):
        assert_close(Scaled(scale).call(X), mix(scale, X))
        assert_close(Scaled.call(Scaled(scale), x=X), mix(scale, X))


def scaled_by(x, factor, *, mode="times"):
    return jd.on(last(), jnp.multiply if mode == "times" else jnp.add)(x, factor)


@on_worker0
def test_static_arguments(world):
    step = jd.jit(scaled_by, static_argnums=1, static_argnames="mode")
    for _ in range(2):
        found = [step(X, 3), step(X, 3, mode="plus"), step(X, factor=4)]
        assert_close(found, [X * 3, X + 3, X * 4])
    assert len(step._steps) == 3
    with pytest.raises(TypeError):
        jd.jit(scaled_by)(X, 3, mode="plus")
