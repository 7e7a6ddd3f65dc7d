"""Programs that XLA divides among several devices of a process: each call in them is made once, for all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import serial, sync
from helpers.worlds import on_worker0, rank
from jax.sharding import NamedSharding, PartitionSpec

import jdistgrad as jd

pytestmark = pytest.mark.one_process  # the ranks of a job have one device each

X = np.linspace(-1, 1, 8, dtype="float32")
made = []


def noted(x):
    made.append(isinstance(x, jax.core.Tracer))
    return jnp.sin(x)


def layer(p, x):
    return jnp.tanh(p * x) + p * p


fast_layer = jax.jit(layer)


def parameters():
    return jnp.asarray(X[::-1] / 2)


def divided(x):
    """Return an array that lies on four devices."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows")))


def in_a_loop(call, function):
    def step(carry, scale):
        carry = jax.lax.cond(scale > 1, lambda c: call(2, function, c), lambda c: call(1, function, c) * scale, carry)
        return carry, carry.sum()

    return lambda x: jax.lax.scan(step, x, jnp.arange(4.0))


@on_worker0
def test_each_call_is_made_once(big_world):
    made.clear()
    program = jax.jit(in_a_loop(sync, noted))
    for scale in (1, 2):
        assert_close(program(divided(scale * X)), in_a_loop(serial, jnp.sin)(scale * X))
    assert made.count(False) == 2 * 4


@pytest.mark.parametrize("function", [layer, fast_layer])
@on_worker0
def test_the_gradient_of_a_reference_counts_once(big_world, function):
    def loss(p, x, call=sync):
        return (call(1, function, p, x) * jnp.cos(call(2, function, p, x)) * x).sum()

    rref, expected = jd.remote(rank(1), parameters), jax.grad(loss, (0, 1))(parameters(), X, serial)
    for compiled in (jax.jit, jd.jit):
        with jd.context() as ctx:
            _, found = jax.block_until_ready(compiled(jax.value_and_grad(loss, (0, 1)))(rref, divided(X)))
            of_parameters = jd.rpc_sync(rank(1), gradient_here, args=(ctx.id, jd.by_reference(rref)))
        assert_close((of_parameters, found[1]), expected)


def gradient_here(ctx, rref):
    return jd.get_gradients(ctx)[rref]


@pytest.mark.parametrize("function", [layer, fast_layer])
@on_worker0
def test_second_derivatives(big_world, function):
    def loss(p, x, call=sync):
        return (call(1, function, p, x) * x).sum()

    with jd.context():
        found = jax.jit(jax.hessian(loss))(divided(parameters()), divided(X))
    assert_close(found, jax.hessian(loss)(parameters(), X, serial), atol=1e-6)


def positive(x):
    if not isinstance(x, jax.core.Tracer) and (x < 0).any():
        raise ValueError("a negative number")
    return x


@on_worker0
def test_a_call_that_fails(big_world):
    program = jax.jit(lambda x: sync(1, positive, sync(2, positive, x)))
    for number in (-1, 1, -1, 1):
        x = divided(jnp.full(8, float(number)))
        if number > 0:
            assert_close(program(x), x)
        else:
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="a negative number"):
                jax.block_until_ready(program(x))
