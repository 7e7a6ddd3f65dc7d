"""The statistics of a DataParallel, and the overlap of reductions with the backward pass."""

import functools
import itertools
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.models import SMALL, batch, loss, parameters, serial
from helpers.worlds import on_all, on_every_worker

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.agreement import Handling, Rules
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.data_parallel.statistics import BucketTimes, Statistics, after_step

PATIENCE = 20  # seconds until a test fails; nothing waits that long otherwise


@pytest.mark.host_memory
@on_every_worker
def test_statistics(big_world, rank, size):
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


@pytest.mark.host_memory
def test_buckets_are_reduced_while_the_backward_pass_runs(big_world):
    # Each reduction waits for the next piece of the backward pass to begin, and that piece for the reduction to begin.
    layers = 4

    def body(rank, size):
        computing = [threading.Event() for _ in range(layers + 1)]
        reducing = [threading.Event() for _ in range(layers)]
        computing[layers].set()
        pieces = itertools.count()

        def work(x):
            piece = next(pieces)
            computing[piece].set()
            assert piece == 0 or reducing[piece - 1].wait(PATIENCE), f"bucket {piece - 1} waits for the backward pass"
            return x

        @jax.custom_vjp
        def layer(w, x):
            return jnp.tanh(x * w)

        def back(kept, g):
            return jax.vjp(lambda w, x: jnp.tanh(x * w), *kept)[1](jax.pure_callback(work, g, g))

        layer.defvjp(lambda w, x: (layer(w, x), (w, x)), back)

        def beside(bucket, state, collectives):
            reducing[bucket.index].set()
            assert computing[bucket.index + 1].wait(PATIENCE), f"the backward pass waits for bucket {bucket.index}"
            return collectives.allreduce(bucket.flat) / bucket.divisor, state

        def deep(params, x):
            return jnp.sum(functools.reduce(lambda x, w: layer(w, x), params, x) ** 2)

        params = [jnp.full(8, 0.5 + k / 10) for k in range(layers)]
        hook = hooks.Hook(lambda bucket: (), beside, "beside")
        dp = DataParallel(bucket_cap_mb=1e-5, hook=hook, overlap=True)
        _, gradients = dp.value_and_grad(deep)(params, jnp.full(8, 1.0 + rank))
        assert_close(gradients, serial(plain, params, [jnp.full(8, 1.0 + r) for r in range(size)])[1])
        told = dp.statistics()
        assert 0 < told.overlap <= told.communication

    def plain(params, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x * w), params, x) ** 2)

    on_all(big_world, body)


@on_every_worker
def test_averages_without_a_leaf_take_no_time(world, rank, size):
    dp = DataParallel()
    dp.average({"w": jnp.ones(3)})
    assert dp.average({}) == {}
    told = dp.statistics()
    assert (told.steps, told.bucket_sizes, told.communication, told.compute) == (2, (), 0, 0)


def test_times_of_a_step_by_its_clock():
    spans = [BucketTimes(0, 11.0, 11.5, 13.0), BucketTimes(1, 14.0, 14.5, 16.0), BucketTimes(2, 15.0, 16.0, 17.0)]
    step = Handling(1, None, {}, started=10.0, spans=spans)
    told = after_step(Statistics(), Rules().plan(Rules().terms([]), None), step, [], 0, 1)
    assert (told.compute, told.communication, told.overlap, told.waiting) == (5.0, 4.0, 2.0, 2.0)
