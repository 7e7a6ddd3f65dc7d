"""DataParallel steps against the serial program on everybody's batches."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from models import SMALL, batch, close, loss, on_all, parameters, serial

import jdistgrad as jd
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.optim.averaging import keep_unused


@pytest.mark.parametrize("settings", [{}, {"bucket_cap_mb": SMALL}], ids=["one bucket", "small buckets"])
def test_gradients_are_those_of_the_whole_batch(world, settings):
    def body(rank, size):
        dp = DataParallel(**settings)
        params = dp.broadcast(parameters(seed=rank))
        close(params, parameters(0))
        value, gradients = dp.value_and_grad(loss)(params, batch(rank))
        _, expected = serial(loss, parameters(0), [batch(r) for r in range(size)])
        close(gradients, expected)
        np.testing.assert_allclose(value, loss(params, batch(rank)), rtol=1e-5)
        dp.verify(gradients)

    on_all(world, body)


def test_the_same_numbers_with_and_without_overlap(big_world):
    def body(rank, size):
        found = []
        for settings in ({"overlap": True}, {"overlap": False}, {"hook": hooks.average()}):
            dp = DataParallel(bucket_cap_mb=SMALL, **settings)
            found.append(dp.value_and_grad(loss)(parameters(), batch(rank)))
        close(found[0], found[1], 1e-7)
        close(found[0], found[2], 1e-6)
        assert len(dp.statistics().bucket_sizes) == 3

    on_all(big_world, body)


@jax.custom_vjp
def along(a, x):
    """Of which the gradient is x itself, not something computed of it."""
    return jnp.vdot(a, x)


along.defvjp(lambda a, x: (jnp.vdot(a, x), x), lambda x, g: (x, x))


def test_inputs_survive_gradients_that_are_inputs(world):
    """Averages are written where the gradients lie; what is somebody else's is copied before."""

    def odd(params, x):
        return along(params["a"], x) + along(params["b"], x) + params["c"].sum(), params["c"]

    def body(rank, size):
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

    on_all(world, body)


def test_argnums_and_keywords(big_world):
    def two(a, b, *, by):
        return jnp.sum(a * b["x"]) * by

    def body(rank, size):
        step = DataParallel().value_and_grad(two, argnums=(1, 0))
        a, b = jnp.arange(3.0), {"x": jnp.full(3, rank + 1.0)}
        value, (gb, ga) = step(a, b, by=2.0)
        np.testing.assert_allclose(gb["x"], 2 * np.arange(3.0), rtol=1e-6)
        np.testing.assert_allclose(ga, np.full(3, size + 1.0), rtol=1e-6)
        assert float(value) == 6 * (rank + 1)

    on_all(big_world, body)


def test_the_whole_step_inside_one_jit(world):
    def body(rank, size):
        dp = DataParallel(bucket_cap_mb=SMALL)
        _, gradients = jax.jit(dp.value_and_grad(loss))(parameters(), batch(rank))
        close(gradients, serial(loss, parameters(), [batch(r) for r in range(size)])[1])

    on_all(world, body)


def test_sums_are_right_when_gradients_come_in_different_orders(big_world):
    """Equal shapes, so a reduction of the wrong partners would go unnoticed; 200 steps."""

    def body(rank, size):
        dp = DataParallel(bucket_cap_mb=SMALL / 100)
        like, chance = [jnp.zeros(3)] * 4, random.Random(rank)
        for step in range(200):
            reduction = dp.reduction(like)
            for leaf in chance.sample(range(4), 4):
                reduction.ready(leaf, jnp.full(3, 1000.0 * leaf + step + rank) + 0)
                if chance.random() < 0.05:
                    time.sleep(0.002)
            for leaf, averaged in enumerate(reduction.finish()):
                assert float(averaged[1]) == pytest.approx(1000 * leaf + step + (size - 1) / 2, rel=1e-6)

    on_all(big_world, body)


def branches(params, x, which):
    chosen = params["both"] * x + params[which]
    return jnp.sum(chosen**2)


def test_ranks_may_use_different_parameters(big_world):
    def body(rank, size):
        dp = DataParallel(find_unused_parameters=True)
        params = {"both": jnp.ones(()), "left": jnp.ones(()), "none": jnp.ones(2), "right": jnp.ones(())}
        which = "left" if rank == 0 else "right"
        tx = keep_unused(optax.adam(0.1))
        state = tx.init(params)
        step = dp.value_and_grad(lambda p, x: branches(p, x, which))
        for _ in range(2):
            _, gradients = step(params, jnp.float32(rank))
            updates, state = jax.jit(tx.update)(gradients, state, params, used=dp.used)
            params = optax.apply_updates(params, updates)
        assert dp.used == {"both": True, "left": True, "none": False, "right": True}
        assert dp.statistics().unused == ("['none']",)
        np.testing.assert_array_equal(params["none"], np.ones(2))
        np.testing.assert_array_equal(state[0].mu["none"], np.zeros(2))
        assert all(float(params[name]) < 1 for name in ("both", "left", "right"))
        dp.verify(params)

    on_all(big_world, body)


def test_unused_moments_do_not_decay():
    tx = keep_unused(optax.adam(0.1))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    both, one = {"a": True, "b": True}, {"a": True, "b": False}
    _, state = tx.update(params, tx.init(params), params, used=both)
    updates, after = tx.update({"a": jnp.ones(2), "b": jnp.zeros(2)}, state, params, used=one)
    np.testing.assert_array_equal(after[0].mu["b"], state[0].mu["b"])
    np.testing.assert_array_equal(after[0].nu["b"], state[0].nu["b"])
    np.testing.assert_array_equal(updates["b"], np.zeros(2))
    assert (after[0].mu["a"] > state[0].mu["a"]).all()


def test_sparse_gradients_travel_as_rows(big_world):
    def body(rank, size):
        dp = DataParallel()
        rows = jnp.array([[rank], [rank], [4]])
        data = jnp.arange(9.0).reshape(3, 3) + rank
        mine = BCOO((data, rows), shape=(5, 3))
        averaged = dp.average({"table": mine, "dense": jnp.ones(2) * rank})
        expected = sum(
            BCOO((jnp.arange(9.0).reshape(3, 3) + r, jnp.array([[r], [r], [4]])), shape=(5, 3)).todense()
            for r in range(size)
        )
        np.testing.assert_allclose(averaged["table"].todense(), expected / size, rtol=1e-6)
        assert len(set(averaged["table"].indices[:, 0].tolist())) == averaged["table"].nse == min(size, 4) + 1
        np.testing.assert_allclose(averaged["dense"], np.full(2, (size - 1) / 2), rtol=1e-6)

    on_all(big_world, body)


def test_a_table_of_which_few_rows_are_used(big_world):
    def lookup(params, ids):
        return jnp.sum(jnp.take(params["table"], ids, axis=0) ** 2) + params["b"]

    def body(rank, size):
        params = {"table": jax.random.normal(jax.random.key(0), (20, 3)), "b": jnp.ones(())}
        ids = [jnp.array([r, r, 7]) for r in range(size)]
        _, gradients = DataParallel(sparse=["['table']"]).value_and_grad(lookup)(params, ids[rank])
        close(gradients, serial(lookup, params, ids)[1])

    on_all(big_world, body)


def test_a_world_is_the_default(world):
    def body(rank, size):
        dp = DataParallel()
        assert (dp.collectives.rank, dp.collectives.size) == (rank, size) == (jd.worker_info().rank, jd.world_size())

    on_all(world, body)
