"""The buckets and states that hooks get, and the threads and precision in which hooks run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.worlds import on_every_worker

from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import HookError
from jdistgrad.optim.averaging import average_gradients


def watching(seen):
    """Return a hook that averages, and appends the buckets that it gets to ``seen``."""

    def apply(bucket, state, collectives):
        seen.append(bucket)
        return collectives.allreduce(bucket.flat) / bucket.divisor, state

    return hooks.Hook(lambda bucket: (), apply, "watching")


def tree(rank):
    return {
        "a": jnp.arange(6.0).reshape(2, 3) + rank,
        "b": jnp.full(4, 10.0 + rank),
        "c": jnp.ones(()) * rank,
        "half": jnp.ones(5, jnp.bfloat16),
    }


@pytest.mark.parametrize("jitted", [False, True], ids=["from Python", "jit"])
@on_every_worker
def test_a_hook_is_shown_its_bucket(big_world, jitted, rank, size):
    # A hook gets the index, dtype, each leaf's path, place and shape, the numbers, and whether the bucket is the last.
    seen = []
    dp = DataParallel(hook=watching(seen), bucket_cap_mb=20 / 2**20)
    average = jax.jit(dp.average) if jitted else dp.average
    averaged = average(tree(rank))
    assert [bucket.index for bucket in seen] == [0, 1, 2]
    assert [bucket.last for bucket in seen] == [False, False, True]
    assert [bucket.dtype for bucket in seen] == [jnp.float32, jnp.float32, jnp.bfloat16]
    assert [bucket.divisor for bucket in seen] == [size] * 3
    places = [[(slot.path, slot.offset, slot.length, slot.shape) for slot in bucket.slots] for bucket in seen]
    assert places == [
        [("['c']", 0, 1, ()), ("['b']", 1, 4, (4,))],
        [("['a']", 0, 6, (2, 3))],
        [("['half']", 0, 5, (5,))],
    ]
    assert [bucket.flat.shape for bucket in seen] == [(5,), (6,), (5,)]
    if not isinstance(seen[0].flat, jax.core.Tracer):
        np.testing.assert_array_equal(seen[0].flat, [rank, *[10 + rank] * 4])
        np.testing.assert_array_equal(seen[1].views()[0], tree(rank)["a"])
    np.testing.assert_allclose(averaged["a"], np.arange(6).reshape(2, 3) + (size - 1) / 2, rtol=1e-6)
    np.testing.assert_allclose(averaged["c"], (size - 1) / 2, rtol=1e-6)


@on_every_worker
def test_hooks_see_every_step_and_keep_a_state_for_each_bucket(big_world, rank, size):
    def apply(bucket, state, collectives):
        return collectives.allreduce(bucket.flat + state) / bucket.divisor, state + 1 + bucket.index

    hook = hooks.Hook(lambda bucket: jnp.zeros(()), apply, "counting")
    dp = DataParallel(hook=hook, bucket_cap_mb=1e-6)
    like = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    found = [dp.average(like) for _ in range(3)]
    assert [float(one["b"][0]) for one in found] == [0, 1, 2]
    assert [float(one["a"][0]) for one in found] == [0, 2, 4]


@on_every_worker
def test_transformations_made_in_every_step_share_what_they_need(big_world, rank, size):
    # Each transformation has a new hook, but all share one channel.
    c, channels = of_this_world(), set()

    def apply(bucket, state, collectives):
        channels.add(collectives.members.name)
        return collectives.allreduce(bucket.flat) / bucket.divisor, state

    @optax.inject_hyperparams
    def make(learning_rate):
        hook = hooks.Hook(lambda bucket: (), lambda *args: apply(*args), "new")
        return optax.chain(average_gradients(c, hook=hook), optax.sgd(learning_rate))

    tx, params = make(learning_rate=0.5), {"w": jnp.zeros(4)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"w": jnp.full(4, rank + 1.0)}, state, params)
    np.testing.assert_allclose(updates["w"], np.full(4, -0.5 * (size + 1) / 2), rtol=1e-6)
    assert len(channels) == 1


@on_every_worker
def test_sums_that_would_overflow(big_world, rank, size):
    for hook in (None, hooks.average(), hooks.int8(), hooks.bfloat16()):
        found = DataParallel(hook=hook).average({"w": jnp.full(4, 3e38)})["w"]
        np.testing.assert_allclose(found, np.full(4, 3e38), rtol=0.02)


@on_every_worker
def test_hooks_do_not_see_tables_of_rows_in_any_step(big_world, rank, size):
    # Eager and compiled steps must give the same numbers.
    seen = []
    dp = DataParallel(hook=watching(seen), sparse=["['table']"])
    mine = {"table": jnp.zeros((4, 2)).at[rank].set(1.0), "w": jnp.ones(3)}
    found = [average(mine) for average in (dp.average, jax.jit(dp.average))]
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert [[slot.path for slot in bucket.slots] for bucket in seen] == [["['w']"]] * 2


@on_every_worker
def test_the_first_steps_are_plain_averages(big_world, rank, size):
    tx = average_gradients(hook=hooks.powersgd(rank=1, start=2, min_rate=0.1))
    every = np.random.default_rng(0).normal(size=(size, 4, 4)).astype("float32")
    state, update = tx.init({"w": every[rank]}), jax.jit(tx.update)
    errors = []
    for _ in range(3):
        found, state = update({"w": jnp.asarray(every[rank])}, state)
        errors.append(np.abs(found["w"] - every.mean(0)).max())
    assert [error < 1e-5 for error in errors] == [True, True, False]


@on_every_worker
def test_low_rank_gradients_after_a_step_without_any(big_world, rank, size):
    tx = average_gradients(hook=hooks.powersgd(rank=1, start=0, min_rate=0.1))
    mine = {"w": jnp.ones((4, 4)).at[0].set(0) * (rank + 1)}
    state = tx.init(mine)
    found, state = tx.update(jax.tree.map(jnp.zeros_like, mine), state)
    np.testing.assert_array_equal(found["w"], np.zeros((4, 4)))
    found, state = tx.update(mine, state)
    assert_close(found["w"], np.asarray(mine["w"]) * (size + 1) / 2 / (rank + 1))


@pytest.mark.parametrize("factor", [1, 2.5])
@on_every_worker
def test_an_average_may_divide_before_and_after_the_sum(big_world, factor, rank, size):
    least = np.float16(6e-8)  # any division makes this number 0
    dp = DataParallel(hook=hooks.average(factor))
    for average in (dp.average, jax.jit(dp.average)):
        found = average({"w": jnp.arange(6.0) + rank, "least": jnp.full(3, least)})
        np.testing.assert_allclose(found["w"], np.arange(6) + (size - 1) / 2, rtol=1e-6)
        np.testing.assert_array_equal(found["least"], least if factor == 1 else 0)


@pytest.mark.parametrize("jitted", [False, True], ids=["called", "jit"])
@on_every_worker
def test_gradients_in_other_dtypes_than_the_parameters(world, jitted, rank, size):
    params = {"a": jnp.ones((4, 3)), "b": jnp.ones(3, jnp.bfloat16)}
    for like in (params, jax.tree.map(jnp.float32, params)):  # in two buckets, and in one
        other = {"a": jnp.ones((4, 3)), "b": jnp.ones(3, jnp.float32 if like is params else jnp.bfloat16)}
        tx = average_gradients(hook=hooks.bfloat16())
        state = tx.init(like)
        found, after = (jax.jit(tx.update) if jitted else tx.update)(other, state)
        assert_close(found, other)
        assert jax.tree.structure(after) == jax.tree.structure(state)
        tx = average_gradients(hook=hooks.int8(block=4))
        with pytest.raises(HookError):
            (jax.jit(tx.update) if jitted else tx.update)(other, tx.init(like))
