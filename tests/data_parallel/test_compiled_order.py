"""Compiled steps; and those that ranks take in different orders or numbers: an error on every rank, no wrong sum."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close, unaligned
from helpers.models import SMALL, batch, gradient, loss, parameters, serial
from helpers.worlds import last, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import DisagreementError, MissingRanksError
from jdistgrad.rpc import watchdog

TOLD = (jax.errors.JaxRuntimeError, DisagreementError)  # JAX's type for errors in compiled code, or the project's own


def square(p):
    return (p["a"] ** 2).sum()


def cube(p):
    return (p["b"] ** 3).sum()


@pytest.mark.parametrize("length", [4, 5000], ids=["as large as the other", "larger"])
@on_every_worker
def test_steps_in_another_order_on_one_rank_are_told_on_all(big_world, length, rank, size):
    dp = DataParallel()
    one, two = jax.jit(dp.value_and_grad(square)), jax.jit(dp.value_and_grad(cube))
    a, b = {"a": jnp.full((2, 2), 1.0 + rank)}, {"b": jnp.full(length, 10.0 + rank)}

    def right():
        np.testing.assert_allclose(one(a)[1]["a"], 2 * np.mean([1.0 + r for r in range(size)]))
        np.testing.assert_allclose(two(b)[1]["b"], 3 * np.mean([(10.0 + r) ** 2 for r in range(size)]), rtol=1e-6)

    right()
    for step, x in [(one, a), (two, b)] if rank else [(two, b), (one, a)]:
        with pytest.raises(TOLD, match=r"not in the same operation.*rank 0 does compiled step of \['[ab]'\]"):
            jax.block_until_ready(step(x))
    right()


@on_every_worker
def test_operations_of_python_after_a_program_that_begins_late(big_world, rank, size):
    c = jd.collectives.of_this_world()
    total = jax.jit(c.allreduce)
    for turn in range(30):
        found = total(unaligned((1024, 1024), turn + rank))
        assert c.allgather_object(turn) == [turn] * size
        assert c.allreduce(jnp.float32(turn)) == size * turn
        assert found[0, 0] == size * turn + sum(range(size))


@on_every_worker
def test_a_rank_that_does_not_come_is_named(big_world, rank, size):
    dp = DataParallel(timeout=2)
    step = jax.jit(dp.value_and_grad(square))
    a = {"a": jnp.ones((2, 3))}
    step(a)
    if rank != 1:
        with pytest.raises((jax.errors.JaxRuntimeError, MissingRanksError), match="rank 1 has not come within 2 s"):
            jax.block_until_ready(step(a))
        with pytest.raises(Exception, match="this group was closed"):
            jax.block_until_ready(step(a))
    jd.rpc_sync(0, abs, args=(-1,))


def meets_in_programs(function, *args):
    """Return how often the ranks meet in a program: each section has a beginning and an end."""
    return str(jax.make_jaxpr(function)(*args)).count("ordered_host_call[")


@on_every_worker
def test_one_meeting_is_enough_for_all_buckets_of_a_step(big_world, rank, size):
    dp, quiet = DataParallel(bucket_cap_mb=SMALL), DataParallel(bucket_cap_mb=SMALL, check=False)
    args = parameters(), batch(rank)
    assert len(dp._driver.plan_for(parameters()).buckets) >= 3
    with_check, without = (meets_in_programs(each.value_and_grad(loss), *args) for each in (dp, quiet))
    assert 1 <= with_check - without <= 2  # the beginning of a section, and over MPI the end
    expected = serial(loss, parameters(), [batch(r) for r in range(size)])[1]
    assert_close(jax.jit(quiet.value_and_grad(loss))(*args)[1], expected)


@jax.jit
def scaled(x):
    return jnp.arange(3.0) * x


@on_every_worker
def test_a_step_in_a_staged_program_keeps_its_order(big_world, rank, size):
    # jd.jit runs each piece of a program when its answers are there: on one rank at once, on another one late.
    dp = DataParallel(timeout=20)

    def loss(p, x):
        return jnp.sum(jd.rpc_sync(last(), scaled, args=(x,)) * p)

    step = jd.jit(dp.value_and_grad(loss))
    for number in range(20):
        _, found = step(jnp.ones(3), jnp.float32(rank + number))
        assert_close(found, jnp.arange(3.0) * (number + (size - 1) / 2))


def mean_of_trainers():
    dp = DataParallel(jd.collectives.of_this_world([1, 2], timeout=60))
    if jd.rank() == 1:
        time.sleep(4 * watchdog.ASK_SECONDS)
    return float(dp.mean(float(jd.rank())))


@pytest.mark.parametrize("pause", [0, 4 * watchdog.ASK_SECONDS])
@on_worker0
def test_called_workers_wait_for_one_that_is_busy_or_called_later(big_world, pause):
    # Those that are called are in ``shutdown`` all the time, and yet they come.
    first = jd.rpc_async(2, mean_of_trainers)
    time.sleep(pause)
    assert [jd.rpc_sync(1, mean_of_trainers), first.result()] == [1.5, 1.5]


def averaged(size):
    return serial(loss, parameters(), [batch(r) for r in range(size)])[1]


@on_every_worker
def test_a_step_whose_arguments_are_constants_of_the_program(big_world, rank, size):
    # No argument of the step is a tracer, but the step must still be compiled and run each time.
    dp, params, x, sums = DataParallel(bucket_cap_mb=SMALL), parameters(), batch(rank), jd.collectives.of_this_world()
    run = jax.jit(lambda: (dp.value_and_grad(loss)(params, x)[1], dp.average(params), sums.allreduce(x[0])))
    for _ in range(2):
        gradients, mean, total = run()
        assert_close(gradients, averaged(size))
        assert_close(mean, params)
        np.testing.assert_allclose(total, sum(batch(r)[0] for r in range(size)), rtol=1e-5, atol=1e-6)
    assert dp.statistics().steps == 0


@on_every_worker
def test_no_sync_and_average_in_one_program(big_world, rank, size):
    dp = DataParallel()
    step = dp.value_and_grad(loss)

    @jax.jit
    def accumulated(params, x):
        with dp.no_sync():
            own = step(params, x)[1]
            return own, dp.average(own)

    own, mean = accumulated(parameters(), batch(rank))
    assert_close(own, gradient(loss)(parameters(), batch(rank)))
    assert_close(mean, averaged(size))
