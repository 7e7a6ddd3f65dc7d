"""Whole trainings: hooks converge, optimizers of all kinds give what the serial program gives."""

import functools

import flax.linen as nn
import flax_step
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import (
    SMALL,
    batch,
    close,
    descend,
    gradient,
    loss,
    mean_of,
    on_all,
    parameters,
    serial,
    serially,
)

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.batch_norm import SyncBatchNorm, batch_statistics
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.optim.averaging import average_gradients
from jdistgrad.optim.sharding import shard_state


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
    "average": hooks.average(),
    "float16": hooks.float16(),
    "bfloat16": hooks.bfloat16(),
    "int8": hooks.int8(block=16),
    "powersgd": hooks.powersgd(rank=1, start=5, min_rate=0.5),
    "user's": clipped(),
}


@functools.cache
def trained_serially(size, steps=40):
    params = start()
    for _ in range(steps):
        params = descend(params, serial(regression, params, [task(r) for r in range(size)])[1])
    return jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("name", HOOKS)
def test_training_converges_with_each_hook(big_world, name):
    plain, data = trained_serially(big_world.size), [task(r) for r in range(big_world.size)]
    before, reached = serial(regression, start(), data)[0], serial(regression, plain, data)[0]

    def body(rank, size):
        dp, params = DataParallel(hook=HOOKS[name]), start()
        step = dp.value_and_grad(regression)
        for _ in range(40):
            params = descend(params, step(params, data[rank])[1])
        dp.verify(params)
        after = serial(regression, params, data)[0]
        assert after < before / 3
        assert after < 1.3 * reached + 0.02
        if name in ("none", "average"):
            close(params, plain, 1e-4)

    on_all(big_world, body)


def test_powersgd_of_full_rank_is_the_average(big_world):
    def body(rank, size):
        dp = DataParallel(hook=hooks.powersgd(rank=4, start=0, min_rate=1e-3))
        everybodys = [normal(np.random.default_rng(r), 8, 4) for r in range(size)]
        for _ in range(2):
            averaged = dp.average({"w": jnp.asarray(everybodys[rank]), "b": jnp.full(3, float(rank))})
        np.testing.assert_allclose(averaged["w"], sum(everybodys) / size, atol=1e-5)
        np.testing.assert_allclose(averaged["b"], np.full(3, (size - 1) / 2), rtol=1e-6)

    on_all(big_world, body)


def test_error_feedback_loses_nothing(big_world):
    """What int8 rounds off one step comes with the next: the sum over steps is right to one step's rounding."""

    def body(rank, size):
        dp = DataParallel(hook=hooks.int8())
        cubes = np.linspace(-1, 1, 50, dtype="float32") ** 3
        total = sum(np.asarray(dp.average({"w": jnp.asarray(cubes * (rank + 1))})["w"]) for _ in range(50))
        np.testing.assert_allclose(total / 50, cubes * (size + 1) / 2, atol=size / 127 / 25)

    on_all(big_world, body)


@functools.cache
def optimized_serially(tx, size, steps):
    """The parameters after some steps of an optimizer on everybody's batches."""

    def step(params, state, batches):
        _, gradients = mean_of(loss)(params, batches)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters()
    state = tx.init(params)
    for k in range(steps):
        params, state = serially(step, params, state, [batch(r, seed=k) for r in range(size)])
    return params


EITHER_WAY = pytest.mark.parametrize(
    ("jitted", "plain"),
    [(True, optax.adamw(0.05, weight_decay=0.1)), (False, optax.sgd(0.05, momentum=0.9))],
    ids=["jit", "eager"],
)


@EITHER_WAY
def test_average_gradients_with_any_optimizer(world, jitted, plain):
    expected = optimized_serially(plain, world.size, 3)

    def body(rank, size):
        tx = optax.chain(average_gradients(bucket_cap_mb=SMALL), plain)
        params, traced = parameters(), []
        state = tx.init(params)

        def update(gradients, state, params):
            traced.append(1)
            updates, state = tx.update(gradients, state, params, value=1.0)  # an extra argument nobody takes
            return optax.apply_updates(params, updates), state

        run = jax.jit(update) if jitted else update
        for k in range(3):
            params, state = run(gradient(loss)(params, batch(rank, seed=k)), state, params)
        close(params, expected, 2e-3)
        assert len(traced) == (1 if jitted else 3)

    on_all(world, body)


def test_average_gradients_under_inject_hyperparams(big_world):
    def body(rank, size):
        c = of_this_world()

        @optax.inject_hyperparams
        def make(learning_rate):
            return optax.chain(average_gradients(c, hook=HOOKS["int8"]), optax.sgd(learning_rate))

        tx = make(learning_rate=0.5)
        params = {"w": jnp.zeros(4), "skipped": None}
        state = tx.init(params)
        gradients = {"w": jnp.full(4, rank + 1.0), "skipped": None}
        for rate in (0.5, 0.25):
            state.hyperparams["learning_rate"] = jnp.float32(rate)
            updates, state = jax.jit(tx.update)(gradients, state, params)
            np.testing.assert_allclose(updates["w"], np.full(4, -rate * (size + 1) / 2), rtol=1e-2)
            assert updates["w"].dtype == jnp.float32

    on_all(big_world, body)


@EITHER_WAY
def test_sharded_optimizer_state_gives_the_same_training(world, jitted, plain):
    expected = optimized_serially(plain, world.size, 3)

    def body(rank, size):
        tx = optax.chain(average_gradients(), shard_state(plain))
        params = parameters()
        state = tx.init(params)
        update = jax.jit(tx.update) if jitted else tx.update
        for k in range(3):
            updates, state = update(gradient(loss)(params, batch(rank, seed=k)), state, params)
            params = optax.apply_updates(params, updates)
        close(params, expected, 2e-3)
        elements = sum(p.size for p in jax.tree.leaves(params) if p.dtype == jnp.float32)
        moment = optax.tree_utils.tree_get(state, "mu" if jitted else "trace")
        assert moment["float32"].size == -(-elements // size)

    on_all(world, body)


def test_batch_norm_over_unequal_and_empty_batches(big_world):
    def body(rank, size):
        c = of_this_world()
        x = [np.random.default_rng(r).normal(r, 1 + r, size=(3 * r, 4)).astype("float32") for r in range(size)]
        whole = np.concatenate(x)
        mean, var = jax.jit(lambda x: batch_statistics(x, c))(jnp.asarray(x[rank]))
        np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(var, whole.var(0), rtol=1e-5, atol=1e-5)

    on_all(big_world, body)


def test_flax_with_batch_norm_and_dropout(big_world):
    """Against flax's own batch norm on the whole batch, in training and in evaluation."""
    variables, expected_loss, expected_stats, expected = flax_step.serially(big_world.size)

    def body(rank, size):
        dp = DataParallel()
        norm = functools.partial(SyncBatchNorm, dp.collectives)
        mine = dp.broadcast(jax.tree.map(lambda leaf: jnp.asarray(leaf + rank), variables))
        step = dp.value_and_grad(functools.partial(flax_step.loss, norm), has_aux=True)
        (value, new), gradients = step(mine["params"], mine["batch_stats"], *flax_step.inputs(rank))
        close(gradients, expected, 1e-4)
        close(new, expected_stats, 1e-4)
        np.testing.assert_allclose(dp.collectives.allreduce(value) / size, expected_loss, rtol=1e-5)
        after, x = {"params": variables["params"], "batch_stats": new}, flax_step.inputs(rank)
        plain = serially(functools.partial(flax_step.evaluated, nn.BatchNorm), after, *x)
        close(jax.jit(functools.partial(flax_step.evaluated, norm))(after, *x), plain)

    on_all(big_world, body)


def test_training_goes_on_from_a_checkpoint(big_world):
    def body(rank, size):
        def train(params, state, steps):
            dp = DataParallel()
            step, tx = dp.value_and_grad(regression), optax.adam(0.01)
            state = tx.init(params) if state is None else state
            for _ in range(steps):
                _, gradients = step(params, task(rank))
                updates, state = tx.update(gradients, state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        whole, _ = train(start(), None, 6)
        half = train(start(), None, 3)
        saved = jax.tree.map(np.asarray, half)
        resumed, _ = train(*jax.tree.map(jnp.asarray, saved), 3)
        close(resumed, whole, 1e-6)

    on_all(big_world, body)
