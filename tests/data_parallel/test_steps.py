"""DataParallel steps against the serial program on everybody's batches."""

import json
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO
from models import SMALL, batch, close, descend, gradient, loss, on_all, parameters, serial

import jdistgrad as jd
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.data_parallel.statistics import trace
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


def test_no_sync_keeps_gradients_and_average_reduces_their_sum(world):
    def body(rank, size):
        dp = DataParallel()
        step = dp.value_and_grad(loss)
        parts = []
        with dp.no_sync():
            for k in range(2):
                parts.append(step(parameters(), batch(rank, seed=k))[1])
                close(parts[-1], gradient(loss)(parameters(), batch(rank, seed=k)))
        total = dp.average(jax.tree.map(jnp.add, *parts))
        expected = [serial(loss, parameters(), [batch(r, seed=k) for r in range(size)])[1] for k in range(2)]
        close(total, jax.tree.map(jnp.add, *expected), 2e-5)
        close(parts[0], gradient(loss)(parameters(), batch(rank, seed=0)))
        assert dp.statistics().steps == 1

    on_all(world, body)


def test_gradients_of_a_context_are_averaged_and_put_back(world):
    """Values that were not used count as zero; what has no derivative stays as it is."""

    def body(rank, size):
        dp = DataParallel()
        used, unused = jd.RRef({"w": jnp.arange(3.0), "n": jnp.arange(2)}), jd.RRef(jnp.ones(2))
        optimizer = jd.DistributedOptimizer(optax.sgd(1.0), [used, unused])
        with jd.context() as ctx:
            jd.backward(ctx, lambda value: jnp.sum(value.to_here()["w"] ** 2) * (rank + 1), used)
            dp.average_in(ctx, [used, unused])
            optimizer.step(ctx)
        np.testing.assert_allclose(used.local_value()["w"], np.arange(3.0) * (1 - (size + 1)), rtol=1e-6)
        np.testing.assert_array_equal(used.local_value()["n"], np.arange(2))
        np.testing.assert_array_equal(unused.local_value(), np.ones(2))
        dp.verify(used.local_value())
        with pytest.raises(jd.ContextError, match="closed"):
            dp.average_in(ctx, [used])

    on_all(world, body)


def test_gradients_of_contexts_with_uneven_inputs(big_world):
    """Rank r has r + 1 steps, each with a context of its own; all end with the last one's value."""

    def body(rank, size):
        dp, dense = DataParallel(), jd.RRef(jnp.ones(3))
        optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [dense])
        with dp.join(divide_by_initial_world_size=False) as join:
            for _ in range(rank + 1):
                with jd.context() as ctx:
                    jd.backward(ctx, lambda value: jnp.sum(value.to_here()) * (rank + 1.0), dense)
                    dp.average_in(ctx, [dense])
                    optimizer.step(ctx)
            final = join.finish(dense.local_value())
        means = [np.mean([r + 1.0 for r in range(step, size)]) for step in range(size)]
        np.testing.assert_allclose(final, np.full(3, 1 - 0.1 * sum(means)), rtol=1e-5)

    on_all(big_world, body)


def test_parameters_averaged_every_few_steps(big_world):
    """Ranks that go their own way for some steps, and meet."""

    def body(rank, size):
        dp, params = DataParallel(), {"w": jnp.full(3, float(rank))}
        for _ in range(2):
            params = dp.average(jax.tree.map(lambda p: p + rank, params))
        np.testing.assert_allclose(params["w"], np.full(3, 3 * (size - 1) / 2), rtol=1e-6)
        dp.verify(params)

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


@pytest.mark.parametrize("initially", [True, False])
def test_join_with_uneven_inputs(world, initially):
    """Rank r has 2 r batches: rank 0 none at all. Against the same steps made by hand."""
    expected = parameters()
    for k in range(2 * (world.size - 1)):
        batches = [batch(r, seed=k) for r in range(world.size) if 2 * r > k]
        share = len(batches) / world.size if initially else 1.0
        expected = descend(expected, serial(loss, expected, batches)[1], 0.1 * share)

    def body(rank, size):
        dp, params = DataParallel(bucket_cap_mb=SMALL), parameters()
        step = dp.value_and_grad(loss)
        with dp.join(divide_by_initial_world_size=initially) as join:
            for k in range(2 * rank):
                params = descend(params, step(params, batch(rank, seed=k))[1])
            params = join.finish(params)
        close(params, expected, 1e-4)
        dp.verify(params)
        _, gradients = step(params, batch(rank))
        close(gradients, serial(loss, params, [batch(r) for r in range(size)])[1], 1e-4)

    on_all(world, body)


def test_join_with_hooks_and_unused_parameters(big_world):
    def body(rank, size):
        dp = DataParallel(hook=hooks.int8(block=8), find_unused_parameters=True)
        params, step = parameters(), dp.value_and_grad(loss)
        with dp.join() as join:
            for k in range(1 + rank):
                step(params, batch(rank, seed=k))
            marked = join.finish({"rank": jnp.float32(rank)})
        assert float(marked["rank"]) == size - 1
        with dp.join():
            for _ in range(size - rank):
                step(params, batch(rank))

    on_all(big_world, body)


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


def test_statistics(big_world):
    def body(rank, size):
        def slow(bucket, state, collectives):
            time.sleep(0.02)
            return collectives.allreduce(bucket.flat) / bucket.divisor, state

        dp = DataParallel(bucket_cap_mb=SMALL, hook=hooks.Hook(lambda bucket: (), slow, "slow"))
        step = dp.value_and_grad(loss)
        for _ in range(2):
            step(parameters(), batch(rank))
        told = dp.statistics()
        assert (told.rank, told.size, told.steps, told.hook) == (rank, size, 2, "slow")
        assert told.buckets_reduced == 2 * len(told.bucket_sizes)
        assert sum(told.bucket_sizes) * 2 == told.bytes_reduced
        assert sorted(k for bucket in told.bucket_leaves for k in bucket) == list(range(9)) == sorted(told.order)
        assert told.communication >= 0.02 * len(told.bucket_sizes)
        assert 0 <= told.overlap <= min(told.communication, told.compute)
        assert [span.bucket for span in told.spans] == list(range(len(told.bucket_sizes)))
        require_trace(json.loads(json.dumps(trace(told))), told)

    on_all(big_world, body)


def require_trace(found, told):
    """What a trace viewer reads: complete events with a process, a track, a start and a duration in microseconds."""
    assert {event["pid"] for event in found["traceEvents"]} == {told.rank}
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    tracks = {event["args"]["name"]: event["tid"] for event in found["traceEvents"] if event["ph"] == "M"}
    assert list(tracks) == ["compute", "waiting", "communication"]
    for track, number in tracks.items():
        length = sum(event["dur"] for event in events if event["tid"] == number)
        assert length == pytest.approx(getattr(told, track) * 1e6, abs=1)
    sent = [(event["name"], event["args"]["bytes"]) for event in events if event["tid"] == tracks["communication"]]
    assert sent == [(f"bucket {k}", size) for k, size in enumerate(told.bucket_sizes)]
    assert trace() == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_communication_hides_behind_computation(big_world):
    """Each reduction takes 30 ms longer, each piece of the backward pass about as long: most of it is hidden."""

    def work(x):
        return jax.pure_callback(lambda x: (time.sleep(0.03), x)[1], x, x)

    @jax.custom_vjp
    def slow_layer(w, x):
        return jnp.tanh(x * w)

    slow_layer.defvjp(
        lambda w, x: (jnp.tanh(x * w), (w, x)),
        lambda kept, g: jax.vjp(lambda w, x: jnp.tanh(x * w), *kept)[1](work(g)),
    )

    def deep(params, x):
        for w in params:
            x = slow_layer(w, x)
        return jnp.sum(x**2)

    def late(bucket, state, collectives):
        time.sleep(0.03)
        return collectives.allreduce(bucket.flat) / bucket.divisor, state

    def body(rank, size):
        params = [jnp.full(8, 0.5 + k / 10) for k in range(8)]
        dp = DataParallel(bucket_cap_mb=1e-5, hook=hooks.Hook(lambda bucket: (), late, "late"))
        step = dp.value_and_grad(deep)
        shares = []
        for _ in range(4):
            _, gradients = step(params, jnp.full(8, 1.0 + rank))
            told = dp.statistics()
            shares.append(told.overlap / told.communication)
        close(gradients, serial(deep, params, [jnp.full(8, 1.0 + r) for r in range(size)])[1])
        assert len(told.bucket_sizes) == 8
        assert max(shares) > 0.6, shares

    on_all(big_world, body)


def test_a_world_is_the_default(world):
    def body(rank, size):
        dp = DataParallel()
        assert (dp.collectives.rank, dp.collectives.size) == (rank, size) == (jd.worker_info().rank, jd.world_size())

    on_all(world, body)
