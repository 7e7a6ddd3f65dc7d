"""Arrays in column-major layout on one rank only: collectives must use their values, not their memory order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_every_worker
from jax.experimental.layout import Format, Layout

from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel

HERE = 1  # the rank with such arrays


def table(rank, start=0.0):
    found = jnp.arange(6.0).reshape(2, 3) + start
    return jax.device_put(found, Format(Layout((1, 0)), found.sharding)) if rank == HERE else found


def plain(start=0.0):
    return np.arange(6.0).reshape(2, 3) + start


def test_it_lies_so():
    assert np.asarray(table(HERE)).flags.f_contiguous
    np.testing.assert_array_equal(table(HERE), plain())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["called", "compiled"])
@on_every_worker
def test_operations(big_world, wrap, rank, size):
    c = of_this_world()

    def every_operation(x):
        return c.allreduce(x), c.allreduce(x, "max"), c.broadcast(x, HERE), c.allgather(x)

    every = np.stack([plain(r) for r in range(size)])
    found = wrap(every_operation)(table(rank, rank))
    for one, expected in zip(found, (every.sum(0), every[-1], every[HERE], every), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize(
    "settings", [{}, {"hook": hooks.float16()}, {"sparse": ["[0]"]}], ids=["plainly", "by a hook", "as rows"]
)
@on_every_worker
def test_averages(big_world, settings, rank, size):
    mine = [table(rank, rank), jnp.full(3, 1.0 + rank)]
    found = DataParallel(**settings).average(mine)
    np.testing.assert_allclose(found[0], plain((size - 1) / 2), rtol=1e-3)
    np.testing.assert_allclose(found[1], np.full(3, (size + 1) / 2), rtol=1e-3)
    np.testing.assert_array_equal(mine[0], plain(rank))


@on_every_worker
def test_models(big_world, rank, size):
    dp = DataParallel()
    dp.verify([table(rank)])
    np.testing.assert_array_equal(dp.broadcast([table(rank, rank)], HERE % size)[0], plain(HERE % size))
    step = dp.value_and_grad(lambda w, x: jnp.sum(w * x))
    _, gradient = step(table(rank), table(rank, rank))
    np.testing.assert_allclose(gradient, plain((size - 1) / 2), rtol=1e-6)
