"""What a DataParallel tells of its steps, and what it hides behind them."""

import time

import jax
import jax.numpy as jnp
from models import SMALL, batch, close, loss, on_all, parameters, serial

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.data_parallel.statistics import Clock, Span, times


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

    on_all(big_world, body)


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
        dp = DataParallel(bucket_cap_mb=1e-5, hook=hooks.Hook(lambda bucket: (), late, "late"), overlap=True)
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


def test_averages_without_a_leaf_take_no_time(world):
    def body(rank, size):
        dp = DataParallel()
        dp.average({"w": jnp.ones(3)})
        assert dp.average({}) == {}
        told = dp.statistics()
        assert (told.steps, told.bucket_sizes, told.communication, told.compute) == (2, (), 0, 0)

    on_all(world, body)


def test_times_of_a_step_by_its_clock():
    clock = Clock(started=10.0, spans=[Span(0, 11.0, 11.5, 13.0), Span(1, 14.0, 14.5, 16.0), Span(2, 15.0, 16.0, 17.0)])
    assert times(clock) == {"compute": 5.0, "communication": 4.0, "overlap": 2.0, "waiting": 2.0}
