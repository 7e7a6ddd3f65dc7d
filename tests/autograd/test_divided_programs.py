"""Programs over several devices of a process. A call in a program that XLA divides is made once, for all devices.

In ``jax.shard_map`` each device makes calls of its own.
"""

import functools

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


def four_devices():
    return jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))


def divided(x):
    """Return an array that lies on four devices."""
    return jax.device_put(x, NamedSharding(four_devices(), PartitionSpec("rows")))


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


def on_four_devices(x):
    return x if isinstance(x, jax.core.Tracer) else jnp.sin(divided(x)).sum() * x


@on_worker0
def test_a_call_that_waits_for_another_program_on_several_devices(big_world):
    """XLA runs one such program at a time. In a local world the workers are threads of the process."""

    def program(x):
        return jd.rpc_sync(rank(1), on_four_devices, args=(x,), timeout=0.3) * 2

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="one multi-device program of a process"):
        jax.block_until_ready(jax.jit(program)(divided(X)))
    # A later call has all the time that it needs.
    expected = np.sin(X).sum() * X
    assert_close(jd.jit(functools.partial(sync, 1, on_four_devices))(divided(X)), expected, atol=1e-6)


# In shard_map: p is the same on all devices, x are each device's rows.


def of_both(call, function, p, x):
    return call(1, function, p, call(2, function, p, x))


def of_what_is_the_same(call, function, p, x):
    return call(1, function, p, jnp.ones(2)) * x


def of_a_sum(call, function, p, x):
    return call(1, function, p, jax.lax.psum(x, "rows") * x)


def in_a_branch(call, function, p, x):
    return jax.lax.cond(p[0] > 0, lambda x: call(1, function, p, x), lambda x: x, x)


def in_steps(call, function, p, x):
    return jax.lax.scan(lambda y, scale: (call(1, function, p, y * scale), y.sum()), x, jnp.arange(1.0, 3.0))[0]


def mapped(body, call, function, *, typed=True):
    """Return a loss of parameters that are closed over, and of rows; one of arrays also has them as an argument."""
    rows = PartitionSpec("rows")

    def loss(p, x):
        each = functools.partial(body, call, function)
        if isinstance(p, jd.RRef):
            each = functools.partial(each, p)
            y = jax.shard_map(each, mesh=four_devices(), in_specs=rows, out_specs=rows, check_vma=typed)(x)
        else:
            specs = (PartitionSpec(), rows)
            y = jax.shard_map(each, mesh=four_devices(), in_specs=specs, out_specs=rows, check_vma=typed)(p, x)
        return (jnp.sin(y) * jnp.arange(1.0, 9.0)).sum()

    return loss


BODIES = [of_both, of_what_is_the_same, of_a_sum, in_a_branch, in_steps]
SAME = jnp.array([0.1, 0.5])


@pytest.mark.parametrize("body", BODIES)
@on_worker0
def test_parameters_that_are_the_same_in_shard_map(big_world, body):
    expected = jax.jit(jax.grad(mapped(body, serial, layer), (0, 1)))(SAME, X)
    function, compiled = (fast_layer, jd.jit) if body in (of_both, in_a_branch) else (layer, jax.jit)
    with jd.context():
        assert_close(compiled(jax.grad(mapped(body, sync, function), (0, 1)))(SAME, X), expected, rtol=1e-4)


@pytest.mark.parametrize("body", [of_both, of_a_sum])
@on_worker0
def test_second_derivatives_in_shard_map(big_world, body):
    expected = jax.jit(jax.jacrev(jax.grad(mapped(body, serial, layer))))(SAME, X)
    with jd.context():
        found = jax.jit(jax.jacrev(jax.grad(mapped(body, sync, fast_layer))))(SAME, X)
    assert_close(found, expected, rtol=1e-4)


@pytest.mark.parametrize("body", [of_both, of_what_is_the_same])
@on_worker0
def test_references_in_shard_map(big_world, body):
    rref = jd.remote(rank(1), jnp.asarray, args=(SAME,))
    expected = jax.jit(jax.grad(mapped(body, serial, layer)))(SAME, X)
    for program in (body, lambda call, function, p, x: body(call, function, p.to_here(), x)):
        step = jax.value_and_grad(mapped(program, sync, layer))
        for compiled in (jax.jit, jd.jit):
            with jd.context() as ctx:
                jax.block_until_ready(compiled(step)(rref, X))
                of_parameters = jd.rpc_sync(rank(1), gradient_here, args=(ctx.id, jd.by_reference(rref)))
            assert_close(of_parameters, expected, rtol=1e-4)


@on_worker0
def test_a_reference_in_shard_map_over_one_of_two_axes(big_world):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh, rows = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=kinds), PartitionSpec("rows")

    def loss(p, x, call=sync):
        each = functools.partial(call, 1, layer, p)
        y = jax.shard_map(each, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"rows"})(x)
        return (jnp.sin(y) * x).sum()

    rref = jd.remote(rank(1), jnp.asarray, args=(X[:4],))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(("rows", "columns"))))
    with jd.context() as ctx:
        jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(rref, x))
        found = jd.rpc_sync(rank(1), gradient_here, args=(ctx.id, jd.by_reference(rref)))
    assert_close(found, jax.jit(jax.grad(lambda p: loss(p, x, serial)))(X[:4]))


@on_worker0
def test_the_gradient_of_a_reference_in_shard_map_without_types_of_axes_is_refused(big_world):
    rref, step = jd.remote(rank(1), jnp.asarray, args=(SAME,)), jax.grad(mapped(of_both, sync, layer, typed=False))
    with jd.context(), pytest.raises(jd.DifferentiationError):
        jax.jit(step)(rref, X)
