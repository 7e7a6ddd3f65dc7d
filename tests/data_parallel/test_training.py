"""Whole trainings: they converge with every hook, and continue from a checkpoint."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.models import descend, serial
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel


def regression(params, data):
    x, y = data
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def task(rank, rows=16):
    random = np.random.default_rng(rank)
    x = random.normal(size=(rows, 8))
    y = np.tanh(x @ np.sin(np.arange(32)).reshape(8, 4)) @ np.cos(np.arange(8)).reshape(4, 2)
    return x.astype("float32"), y.astype("float32")


def start():
    random = np.random.default_rng(99)
    return jax.tree.map(jnp.asarray, {"w": normal(random, 8, 4), "v": normal(random, 4, 2)})


def normal(random, *shape):
    return random.normal(size=shape).astype("float32")


def clipped():
    def apply(bucket, state, collectives):
        return collectives.allreduce(jnp.clip(bucket.flat, -1, 1)) / bucket.divisor, state + 1

    return hooks.Hook(lambda bucket: jnp.zeros(()), apply, "clipped")


HOOKS = {
    "none": None,
    "float16": hooks.float16(),
    "int8": hooks.int8(block=16),
    "powersgd": hooks.powersgd(rank=1, start=5, min_rate=0.5),
    "user's": clipped(),
}


@functools.cache
def trained_serially(size, steps=30):
    params = start()
    for _ in range(steps):
        params = descend(params, serial(regression, params, [task(r) for r in range(size)])[1])
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("name", HOOKS)
@on_every_worker
def test_training_converges_with_each_hook(big_world, name, rank, size):
    plain, data = trained_serially(big_world.size), [task(r) for r in range(big_world.size)]
    before, reached = serial(regression, start(), data)[0], serial(regression, plain, data)[0]
    dp, params = DataParallel(hook=HOOKS[name]), start()
    step = dp.value_and_grad(regression)
    for _ in range(30):
        params = descend(params, step(params, data[rank])[1])
    dp.verify(params)
    after = serial(regression, params, data)[0]
    assert after < before / 3
    assert after < 1.3 * reached + 0.02
    if name == "none":
        assert_close(params, plain, rtol=1e-4, atol=1e-4)


@on_every_worker
def test_powersgd_of_full_rank_is_the_average(big_world, rank, size):
    dp = DataParallel(hook=hooks.powersgd(rank=4, start=0, min_rate=1e-3))
    everybodys = [normal(np.random.default_rng(r), 8, 4) for r in range(size)]
    for _ in range(2):
        averaged = dp.average({"w": jnp.asarray(everybodys[rank]), "b": jnp.full(3, float(rank))})
    np.testing.assert_allclose(averaged["w"], sum(everybodys) / size, atol=1e-5)
    np.testing.assert_allclose(averaged["b"], np.full(3, (size - 1) / 2), rtol=1e-6)


@on_every_worker
def test_error_feedback_loses_nothing(big_world, rank, size):
    # The rounding error of one step is added to the next: the sum over steps is right to one step's rounding.
    dp = DataParallel(hook=hooks.int8())
    cubes = np.linspace(-1, 1, 50, dtype="float32") ** 3
    total = sum(np.asarray(dp.average({"w": jnp.asarray(cubes * (rank + 1))})["w"]) for _ in range(50))
    np.testing.assert_allclose(total / 50, cubes * (size + 1) / 2, atol=size / 127 / 25)
