"""DataParallel steps, compared with the serial program on the batches of all ranks."""

import gc
import random
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.models import SMALL, batch, loss, parameters, serial
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.wire.polling import poll


@pytest.mark.parametrize(("cap", "overlap"), [(None, False), (SMALL, True)], ids=["one piece", "overlap"])
@on_every_worker
def test_gradients_are_those_of_the_whole_batch(world, cap, overlap, rank, size):
    dp = DataParallel(bucket_cap_mb=cap, overlap=overlap)
    params = dp.broadcast(parameters(seed=rank))
    assert_close(params, parameters(0))
    value, gradients = dp.value_and_grad(loss)(params, batch(rank))
    _, expected = serial(loss, parameters(0), [batch(r) for r in range(size)])
    assert_close(gradients, expected)
    np.testing.assert_allclose(value, loss(params, batch(rank)), rtol=1e-5)
    dp.verify(gradients)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one piece"])
@on_every_worker
def test_what_a_loss_calls_keeps_its_order(big_world, overlap, rank, size):
    # The first segment needs the second call only; the gradients need none.
    seen = []

    def noted(params, x):
        jax.experimental.io_callback(lambda: seen.append("first"), None, ordered=True)
        y = jax.experimental.io_callback(lambda x: seen.append("second") or x, x, x, ordered=True)
        jax.experimental.io_callback(lambda: seen.append("third"), None, ordered=True)
        return jnp.sum(params["a"]) + jnp.sum(params["b"]) + jnp.sum(y)

    params, x = {"a": jnp.ones(3), "b": jnp.ones(2)}, np.full(2, rank, np.float32)
    value, _ = DataParallel(bucket_cap_mb=1e-6, overlap=overlap).value_and_grad(noted)(params, x)
    jax.effects_barrier()
    assert seen == ["first", "second", "third"]
    assert value == 5 + 2 * rank


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one piece"])
@on_every_worker
def test_results_that_are_constants_or_arguments_are_arrays_of_their_own(big_world, overlap, rank, size):
    def constant(params, x, n):
        aux = {"batch": x, "number": n, "constant": jnp.int32(4), "Python": 2.5, "NumPy": np.float32(1)}
        return (jnp.sum(params["a"]) + jnp.sum(params["b"]), aux), 3.0

    dp, x = DataParallel(bucket_cap_mb=1e-5, overlap=overlap), np.arange(3.0)
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    (_, aux), _ = dp.value_and_grad(lambda *args: constant(*args)[0], has_aux=True)(params, x, rank)
    expected = jax.jit(lambda *args: constant(*args)[0][1])(params, x, rank)
    described = [[(one.shape, one.dtype) for one in jax.tree.leaves(tree)] for tree in (aux, expected)]
    assert described[0] == described[1]
    value, _ = dp.value_and_grad(lambda *args: constant(*args)[1])(params, x, rank)
    assert all(isinstance(one, jax.Array) for one in [value, *jax.tree.leaves(aux)])
    x[:] = -1  # the next batch, read into the same memory
    np.testing.assert_array_equal(aux["batch"], np.arange(3.0))


@jax.custom_vjp
def along(a, x):
    """Return a loss; its gradient is the array ``x`` itself, not a computed value."""
    return jnp.vdot(a, x)


along.defvjp(lambda a, x: (jnp.vdot(a, x), x), lambda x, g: (x, x))


@on_every_worker
def test_inputs_survive_gradients_that_are_inputs(world, rank, size):
    # Averages overwrite the gradients' memory, so gradients that are inputs must be copied first.

    def odd(params, x):
        return along(params["a"], x) + along(params["b"], x) + params["c"].sum(), params["c"]

    dp = DataParallel(bucket_cap_mb=1e-5)
    params = {"a": jnp.arange(3.0), "b": jnp.ones(3), "c": jnp.ones(2)}
    x = jnp.full(3, rank + 1.0)
    step = dp.value_and_grad(odd, has_aux=True)
    for _ in range(2):
        (_, aux), gradients = step(params, x)
    np.testing.assert_array_equal(x, np.full(3, rank + 1))
    np.testing.assert_array_equal(aux, np.ones(2))
    np.testing.assert_array_equal(params["a"], np.arange(3))
    np.testing.assert_allclose(gradients["a"], np.full(3, (size + 1) / 2), rtol=1e-6)
    np.testing.assert_allclose(gradients["b"], gradients["a"])
    np.testing.assert_array_equal(gradients["c"], np.ones(2))


@on_every_worker
def test_argnums_and_keywords(big_world, rank, size):
    def two(a, b, *, by):
        return jnp.sum(a * b["x"]) * by

    step = DataParallel(check_parameters=False).value_and_grad(two, argnums=(1, 0))
    a, b = jnp.arange(3.0), {"x": jnp.full(3, rank + 1.0)}
    value, (gb, ga) = step(a, b, by=2.0)
    np.testing.assert_allclose(gb["x"], 2 * np.arange(3.0), rtol=1e-6)
    np.testing.assert_allclose(ga, np.full(3, size + 1.0), rtol=1e-6)
    assert float(value) == 6 * (rank + 1)


@on_every_worker
def test_sums_are_right_when_gradients_come_in_different_orders(world, rank, size):
    # The leaves have equal shapes, so only the numbers would show that different leaves were summed.
    dp = DataParallel(bucket_cap_mb=SMALL / 100)
    like, chance = [jnp.zeros(3)] * 4, random.Random(rank)
    for step in range(80):
        reduction = dp.reduction(like)
        for leaf in chance.sample(range(4), 4):
            reduction.ready(leaf, jnp.full(3, 1000.0 * leaf + step + rank) + 0)
            if chance.random() < 0.05:
                time.sleep(0.002)
        for leaf, averaged in enumerate(reduction.finish()):
            assert float(averaged[1]) == pytest.approx(1000 * leaf + step + (size - 1) / 2, rel=1e-6)


@on_every_worker
def test_batches_of_different_sizes(big_world, rank, size):
    # Each shape needs its own program. The ranks agree only on the tree of parameters, which is the same.
    dp = DataParallel()
    step = dp.value_and_grad(loss)
    for rows in ((4, 4, 2), (1, 4, 4)):
        whole = [batch(r, rows[r]) for r in range(size)]
        expected = serial(loss, parameters(), whole)[1]
        assert_close(step(parameters(), whole[rank])[1], expected)
        assert_close(jax.jit(step)(parameters(), whole[rank])[1], expected)
    assert dp.statistics().steps == 2


@on_every_worker
def test_a_step_keeps_no_parameters(big_world, rank, size):
    params, step = parameters(), DataParallel().value_and_grad(loss)
    first = weakref.ref(jax.tree.leaves(params)[0])
    step(params, batch(rank))
    del params
    assert poll(lambda: gc.collect() >= 0 and first() is None, 10)


@on_every_worker
def test_a_leaf_used_twice_and_branches_on_values(big_world, rank, size):
    def shared(params, x):
        h = jnp.tanh(x @ params["w"]) @ params["w"]
        return jax.lax.cond(h.sum() > 0, lambda: (h * params["a"]).sum(), lambda: (h * params["b"]).sum())

    dp = DataParallel(find_unused_parameters=True)
    params = {"w": parameters()["dense"][0]["w"], "a": jnp.ones(6), "b": jnp.full(6, 2.0)}
    _, gradients = dp.value_and_grad(shared)(params, batch(rank))
    assert_close(gradients, serial(shared, params, [batch(r) for r in range(size)])[1])
    assert dp.used == {"w": True, "a": True, "b": True}


@on_every_worker
def test_keys_of_random_generators_are_broadcast_and_verified(world, rank, size):
    dp = DataParallel()
    key = dp.broadcast({"dropout": jax.random.key(rank + 7)}, root=size - 1)["dropout"]
    compiled = jax.jit(dp.broadcast)(jax.random.key(rank))
    for found, seed in ((key, size + 6), (compiled, 0)):
        np.testing.assert_array_equal(*map(jax.random.key_data, (found, jax.random.key(seed))))
    dp.verify({"dropout": key})
