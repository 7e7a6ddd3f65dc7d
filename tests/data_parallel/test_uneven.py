"""Uneven steps: accumulated gradients, different numbers of batches on different ranks, and steps in contexts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import SMALL, batch, descend, gradient, loss, parameters, serial
from helpers.worlds import on_every_worker

import jdistgrad as jd
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import NonFiniteError


@on_every_worker
def test_no_sync_keeps_gradients_and_average_reduces_their_sum(world, rank, size):
    dp = DataParallel()
    step = dp.value_and_grad(loss)
    parts = []
    with dp.no_sync():
        for k in range(2):
            parts.append(step(parameters(), batch(rank, seed=k))[1])
            assert_close(parts[-1], gradient(loss)(parameters(), batch(rank, seed=k)))
    total = dp.average(jax.tree.map(jnp.add, *parts))
    expected = [serial(loss, parameters(), [batch(r, seed=k) for r in range(size)])[1] for k in range(2)]
    assert_close(total, jax.tree.map(jnp.add, *expected), rtol=2e-5, atol=2e-5)
    assert_close(parts[0], gradient(loss)(parameters(), batch(rank, seed=0)))
    assert dp.statistics().steps == 1


@on_every_worker
def test_gradients_of_a_context_are_averaged_and_put_back(world, rank, size):
    # Gradients of unused values count as zero; leaves without a derivative stay as they are.
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


@on_every_worker
def test_gradients_of_a_context_of_values_that_hold_references(world, rank, size):
    # The gradient of what a value holds is averaged where its own reference is given.
    dp, held = DataParallel(), jd.RRef(jnp.ones(3))
    outer, unused = jd.RRef({"held": held, "w": jnp.arange(3.0)}), jd.RRef({"held": held, "w": jnp.ones(2)})
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [outer, held, unused])

    def loss(value):
        return jnp.sum(value["w"] * value["held"].to_here()) * (rank + 1)

    with jd.context() as ctx:
        jd.backward(ctx, lambda value: loss(value.to_here()), outer)
        dp.average_in(ctx, [outer, held, unused])
        optimizer.step(ctx)
    factor = 0.1 * (size + 1) / 2
    assert_close(outer.local_value()["w"], np.arange(3.0) - factor)
    assert_close(held.local_value(), 1 - factor * np.arange(3.0))
    assert_close(unused.local_value()["w"], np.ones(2))


@pytest.mark.parametrize("initially", [True, False])
@on_every_worker
def test_join_with_uneven_inputs(world, initially, rank, size):
    # Rank r has 2 r batches, rank 0 none at all. The expected values come from the same steps made by hand.
    expected = parameters()
    for k in range(2 * (world.size - 1)):
        batches = [batch(r, seed=k) for r in range(world.size) if 2 * r > k]
        share = len(batches) / world.size if initially else 1.0
        expected = descend(expected, serial(loss, expected, batches)[1], 0.1 * share)
    dp, params = DataParallel(bucket_cap_mb=SMALL), parameters()
    step = dp.value_and_grad(loss)
    with dp.join(divide_by_initial_world_size=initially) as join:
        for k in range(2 * rank):
            params = descend(params, step(params, batch(rank, seed=k))[1])
        params = join.finish(params)
    assert_close(params, expected, rtol=1e-4, atol=1e-4)
    dp.verify(params)
    _, gradients = step(params, batch(rank))
    assert_close(gradients, serial(loss, params, [batch(r) for r in range(size)])[1], rtol=1e-4, atol=1e-4)


@on_every_worker
def test_numbers_that_are_not_finite_do_not_end_a_join(big_world, rank, size):
    # Active ranks get the error and go on; ranks that have joined go on with them.
    dp, params = DataParallel(check_finite=True, timeout=20), {"w": jnp.ones(3)}
    with dp.join() as join:
        for k in range(3 * rank):
            bad = rank == size - 1 and k == 3 * rank - 2
            mine = {"w": jnp.full(3, jnp.nan if bad else 1.0)}
            if bad:
                with pytest.raises(NonFiniteError):
                    dp.average(mine)
            else:
                params = {"w": params["w"] + dp.average(mine)["w"] * size}
        params = join.finish(params)
    np.testing.assert_allclose(params["w"], np.full(3, 1 + 3 * sum(range(size)) - 1), rtol=1e-6)


@on_every_worker
def test_ranks_that_have_joined_owe_what_they_owed_before_a_step_that_fails(big_world, rank, size):
    # The second bucket of the step is not finite, when the first has been reduced.
    dp, every = DataParallel(hook=hooks.int8(block=8), check_finite=True, bucket_cap_mb=1e-6), np.random.default_rng(0)
    numbers, zeros = jnp.asarray(every.normal(size=(size, 8)), jnp.float32), [jnp.zeros(8)] * 2
    with dp.join() as join:
        found = [dp.average([numbers[rank]] * 2)]
        if rank == size - 1:
            with pytest.raises(NonFiniteError):
                dp.average([jnp.full(8, jnp.nan), jnp.ones(8)])
            found += [dp.average(zeros), dp.average(zeros)]
        total = join.finish(jax.tree.map(lambda *leaves: sum(leaves), *found))
    for leaf in total:
        np.testing.assert_allclose(leaf, numbers.mean(axis=0), atol=1e-5)
