"""Sparse gradients: each rank has only some rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import serial
from helpers.worlds import on_every_worker
from jax.experimental.sparse import BCOO

from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.parallel import DataParallel
from jdistgrad.errors import LeafError
from jdistgrad.optim.averaging import average_gradients


def dense(sparse):
    """Return a dense array of NumPy's: ``todense`` compiles a program for each shape."""
    table = np.zeros(sparse.shape, sparse.dtype)
    np.add.at(table, np.asarray(sparse.indices)[:, 0], np.asarray(sparse.data))
    return table


@on_every_worker
def test_sparse_gradients_travel_as_rows(big_world, rank, size):
    dp = DataParallel()
    rows = jnp.array([[rank], [rank], [4]])
    data = jnp.arange(9.0).reshape(3, 3) + rank
    mine = BCOO((data, rows), shape=(5, 3))
    averaged = dp.average({"table": mine, "dense": jnp.ones(2) * rank})
    everybodys = [
        BCOO((np.arange(9.0).reshape(3, 3) + r, np.array([[r], [r], [4]])), shape=(5, 3)) for r in range(size)
    ]
    np.testing.assert_allclose(dense(averaged["table"]), sum(map(dense, everybodys)) / size, rtol=1e-6)
    assert len(set(averaged["table"].indices[:, 0].tolist())) == averaged["table"].nse == min(size, 4) + 1
    np.testing.assert_allclose(averaged["dense"], np.full(2, (size - 1) / 2), rtol=1e-6)


@on_every_worker
def test_a_table_of_which_few_rows_are_used(big_world, rank, size):
    def lookup(params, ids):
        return jnp.sum(jnp.take(params["table"], ids, axis=0) ** 2) + params["b"]

    params = {"table": jax.random.normal(jax.random.key(0), (20, 3)), "b": jnp.ones(())}
    ids = [jnp.array([r, r, 7]) for r in range(size)]
    _, gradients = DataParallel(sparse=["['table']"]).value_and_grad(lookup)(params, ids[rank])
    assert_close(gradients, serial(lookup, params, ids)[1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
@on_every_worker
def test_rows_of_negative_zeros_have_the_same_bits_everywhere(world, dtype, rank, size):
    dp = DataParallel(sparse=["['table']"])
    mine = jnp.full((3, 2), -0.0 if rank == 0 else 0.0, dtype).at[2].set(rank)
    averaged = dp.average({"table": mine})
    dp.verify(averaged)
    np.testing.assert_allclose(averaged["table"][2].astype(jnp.complex64), (size - 1) / 2, rtol=1e-2)


def rows_of(rank):
    """Return a gradient of two rows: one of this rank's own, and one that all ranks have."""
    rows, data = np.array([[rank], [4]]), np.full((2, 3), 1.0 + rank, np.float32)
    return BCOO((jnp.asarray(data), jnp.asarray(rows)), shape=(5, 3))


def expected(size):
    return sum(dense(rows_of(r)) for r in range(size)) / size


HOOKS = pytest.mark.parametrize("hook", [None, hooks.int8(block=8)], ids=["none", "int8"])


@HOOKS
@on_every_worker
def test_sparse_gradients_in_an_optimizer(big_world, hook, rank, size):
    tx = optax.chain(average_gradients(hook=hook))
    gradients = {"table": rows_of(rank), "dense": jnp.full(2, 2.0 * rank)}
    averaged, _ = tx.update(gradients, tx.init(gradients))
    np.testing.assert_allclose(dense(averaged["table"]), expected(size), rtol=1e-6)
    np.testing.assert_allclose(averaged["dense"], np.full(2, size - 1.0), rtol=1e-2)


@HOOKS
@pytest.mark.parametrize("initially", [True, False], ids=["by all", "by active"])
@on_every_worker
def test_a_rank_that_has_joined_sends_no_rows(big_world, hook, initially, rank, size):
    dp = DataParallel(hook=hook, sparse=["['named']"])
    tree = {"table": rows_of(rank), "named": dense(rows_of(rank))}
    with dp.join(divide_by_initial_world_size=initially):
        for _ in range(1 + rank):
            averaged = dp.average(tree)
    if rank == size - 1:  # the last step was this rank's alone
        alone = dense(rows_of(rank)) / (size if initially else 1)
        np.testing.assert_allclose(dense(averaged["table"]), alone, rtol=1e-6)
        np.testing.assert_allclose(averaged["named"], alone, rtol=1e-6)


@on_every_worker
def test_sparse_gradients_in_a_compiled_step_are_refused(world, rank, size):
    dp = DataParallel()
    with pytest.raises(LeafError):
        jax.jit(dp.average)({"t": rows_of(0)})
    found = jax.jit(lambda t: dp.average({"t": t.todense()}))(rows_of(0))
    np.testing.assert_allclose(found["t"], dense(rows_of(0)), rtol=1e-6)


@on_every_worker
def test_names_of_sparse_leaves_that_there_are_not(world, rank, size):
    params = {"table": jnp.ones((4, 2)), "scale": jnp.ones(())}

    def loss(params):
        return params["table"].sum() * params["scale"]

    with pytest.raises(LeafError):
        DataParallel(sparse=["['tabel']"]).value_and_grad(loss)(params)
    with pytest.raises(LeafError):
        DataParallel(sparse=["['scale']"]).value_and_grad(loss)(params)
    DataParallel(sparse=["['table']"]).average({"something else": jnp.ones(2)})
