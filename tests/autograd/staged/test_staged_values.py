"""Arguments and results of a staged step: results are arrays of their own, with the types that JAX would give them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, mix
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.wire.arrays import ALIAS_FROM

pytestmark = pytest.mark.world(1, 3)


def aligned(size):
    """Return memory that is aligned so that XLA could use it without a copy."""
    memory = np.zeros(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    return memory[start : start + size]


@pytest.mark.parametrize("size", [3, ALIAS_FROM], ids=["small", "large"])
@on_worker0
def test_results_do_not_change_with_arguments(world, size):
    a, b = aligned(size), aligned(size)
    same, product = jd.jit(lambda x, y: (x, y * 1.0))(a, b)
    a[:], b[:] = 5, 5
    assert_close([same, product], [np.zeros(size)] * 2)


@pytest.mark.parametrize("staged", [jd.jit, jax.jit], ids=["jd.jit", "jax.jit"])
@on_worker0
def test_calls_take_arrays_closed_over_as_they_were_when_traced(world, staged):
    scale = np.full(3, 2.0, np.float32)

    def loss(x):
        here, there = x * scale, jd.rpc_sync(last(), mix, args=(x, scale))
        return (here + there + jd.rpc_async(last(), mix, args=(x,), kwargs={"y": scale}).result()).sum()

    with jd.context():
        step = staged(jax.value_and_grad(loss))
        first = step(X)
        scale[:] = 7
        assert_close(step(X), first)


@pytest.mark.parametrize("staged", [jd.jit, jax.jit], ids=["jd.jit", "jax.jit"])
@pytest.mark.parametrize("arguments", [(), (2.0,)], ids=["of nothing", "of a number"])
@on_worker0
def test_calls_take_what_a_callback_returns_in_this_run(world, staged, arguments):
    rate = [1.0]

    def read(*factors):
        return np.float32(rate[0] * np.prod(factors))

    def step(x):
        found = jax.pure_callback(read, jax.ShapeDtypeStruct((), jnp.float32), *arguments)
        return jd.rpc_sync(last(), mix, args=(x, jnp.full(3, found)))

    run = staged(step)
    for rate[0] in (1.0, 3.0):
        assert_close(run(X), mix(X, jnp.full(3, read(*arguments))))


@on_worker0
def test_gradients_are_no_arguments(world):
    # Donating the gradients to an update must not delete the batch.
    x, w = jnp.arange(3.0), jnp.ones(3)
    step = jd.jit(
        jax.grad(
            lambda v, w, x: (w * x).sum() + (v * x).sum() + jd.rpc_sync(last(), mix, args=(v, v)).sum() * 0, (0, 1)
        )
    )
    gradients = step(w, w, x)
    updated = jax.jit(lambda gradients: [g + 1 for g in gradients], donate_argnums=0)(list(gradients))
    assert_close(updated, [x + 1, x + 1])
    assert not x.is_deleted()


@pytest.mark.parametrize("value", [np.float64(2.5), np.int64(3), 2.5, True, jnp.asarray(2.0)], ids=repr)
@on_worker0
def test_numbers_of_any_kind(world, value):
    step = jd.jit(lambda x, s: jd.rpc_sync(last(), jnp.multiply, args=(x, s)))
    found, expected = step(X, value), jax.jit(jnp.multiply)(X, value)
    assert_close(found, expected)
    assert found.dtype == expected.dtype


@jax.jit
def plus(x, y):
    return x + y


@on_worker0
def test_types_are_those_of_the_serial_program(world):
    weak, narrow = jnp.broadcast_to(jnp.asarray(2.0), (3,)), jnp.ones(3, jnp.bfloat16)
    for to in range(jd.world_size()):
        step = jd.jit(lambda w, b, to=to: jd.rpc_sync(to, plus, args=(w.astype(jnp.float32), b)))
        assert step(weak, narrow).dtype == jnp.float32


def make_counted(value):
    return {"w": jnp.full(3, value), "n": 0}


def count_up(counted):
    counted["n"] += 1
    counted["w"] = counted["w"] * 10


@on_worker0
def test_an_optimizer_sees_what_others_change_in_a_value(world):
    value = jd.remote(last(), make_counted, args=(1.0,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [value])
    step = jd.value_and_grad(lambda value: value.to_here()["w"].sum())
    for _ in range(2):
        jd.rpc_sync(last(), count_up, args=(value,))
        with jd.context() as ctx:
            step(value)
            optimizer.step(ctx)
    found = value.to_here()
    assert_close(found["w"], jnp.full(3, (1.0 * 10 - 0.1) * 10 - 0.1))
    assert found["n"] == 2


@on_worker0
def test_surroundings_of_local_equations_are_kept(world):
    # JAX's context managers where the step was traced must count: here, they choose the random bits of a key.
    key = jax.random.key(7)

    def noisy(partitionable):
        def step(x):
            with jax.threefry_partitionable(partitionable):
                return jd.rpc_sync(last(), jnp.sin, args=(x,)), jax.random.bits(key, (2, 3)) >> 9

        return step

    found = {}
    for partitionable in (True, False):  # the two steps differ only in the surrounding setting
        _, found[partitionable] = jd.jit(noisy(partitionable))(X)
        with jax.threefry_partitionable(partitionable):
            np.testing.assert_array_equal(found[partitionable], jax.random.bits(key, (2, 3)) >> 9)
    assert (found[True] != found[False]).any()
