"""Steps that are part of a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.models import SMALL, batch, gradient, loss, parameters, serial
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel.collectives import mpi, mpi_in_programs
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.parallel import DataParallel


def averaged(size):
    return serial(loss, parameters(), [batch(r) for r in range(size)])[1]


@on_every_worker
def test_the_whole_step_inside_one_jit(world, rank, size):
    dp = DataParallel(bucket_cap_mb=SMALL)
    _, gradients = jax.jit(dp.value_and_grad(loss))(parameters(), batch(rank))
    assert_close(gradients, averaged(size))


@on_every_worker
def test_a_step_whose_arguments_are_constants_of_the_program(big_world, rank, size):
    # No argument of the step is a tracer, but the step must still be compiled and run each time.
    dp, params, x, sums = DataParallel(bucket_cap_mb=SMALL), parameters(), batch(rank), of_this_world()
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@on_every_worker
def test_arrays_larger_than_mpi_can_count_go_in_pieces(big_world, monkeypatch, dtype, rank, size):
    for module in (mpi, mpi_in_programs):
        monkeypatch.setattr(module, "CHUNK", 40)
    c = of_this_world()
    x = jnp.asarray((np.arange(66).reshape(6, 11) + rank) % 3, dtype)
    every = [jnp.asarray((np.arange(66).reshape(6, 11) + r) % 3, dtype) for r in range(size)]
    if dtype != "bool":
        np.testing.assert_array_equal(
            jax.jit(c.allreduce)(x).astype("float32"), sum(e.astype("float32") for e in every)
        )
    np.testing.assert_array_equal(jax.jit(lambda x: c.broadcast(x, size - 1))(x), every[-1])
    np.testing.assert_array_equal(jax.jit(c.allgather)(x), jnp.stack(every))
