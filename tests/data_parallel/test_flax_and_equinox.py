"""Modules of flax.nnx and equinox in data-parallel steps, compared with the same modules in one process."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.data import assert_close
from helpers.models import serial, serially
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel.batch_norm import NnxSyncBatchNorm
from jdistgrad.data_parallel.parallel import DataParallel


def rows_of(rank):
    return np.random.default_rng(rank).normal(rank, 1 + rank, size=(2 + 3 * rank, 4)).astype("float32")


def run(graph, weights, rest, x):
    """Return the sum of squares of a module's results, and the other variables after the call."""
    module = nnx.merge(graph, weights, rest, copy=True)
    return jnp.sum(jnp.sin(module(x)) ** 2), nnx.state(module, nnx.Not(nnx.Param))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.6, "use_scale": False, "epsilon": 0.1}])
@on_every_worker
def test_batch_norm_of_nnx_over_the_batch_of_all_ranks(big_world, settings, rank, size):
    whole = np.concatenate([rows_of(k) for k in range(size)])
    graph, weights, rest = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0), **settings), nnx.Param, ...)
    expected = serially(lambda w, r, x: jax.value_and_grad(run, 1, has_aux=True)(graph, w, r, x), weights, rest, whole)
    dp = DataParallel()
    mine, *_ = nnx.split(NnxSyncBatchNorm(4, dp.collectives, rngs=nnx.Rngs(0), **settings), nnx.Param, ...)
    step = dp.value_and_grad(lambda w, r, x: run(mine, w, r, x), has_aux=True)
    (loss, after), gradients = step(weights, rest, rows_of(rank))
    (expected_loss, expected_after), expected_gradients = expected
    assert_close(dp.collectives.allreduce(loss), jnp.asarray(expected_loss), rtol=1e-4)
    assert_close(after, jax.tree.map(jnp.asarray, expected_after), rtol=1e-4, atol=1e-4)
    assert_close(jax.tree.map(lambda g: g * size, gradients), expected_gradients, rtol=1e-3, atol=1e-3)
    frozen, evaluated = (nnx.merge(one, weights, after, copy=True) for one in (mine, graph))
    assert_close(
        frozen(whole, use_running_average=True), evaluated(whole, use_running_average=True), rtol=1e-4, atol=1e-4
    )


MODEL = eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0))
ARRAYS, REST = eqx.partition(MODEL, eqx.is_array)


def loss(model, x):
    return jnp.mean(jnp.sum(jax.vmap(model)(x) ** 2, -1))


def loss_of_arrays(arrays, x):
    return loss(eqx.combine(arrays, REST), x)


@on_every_worker
def test_a_step_of_an_equinox_module(big_world, rank, size):
    rows = [rows_of(k)[: 2 + k // 2] for k in range(size)]
    everybodys = eqx.combine(jax.tree.map(lambda leaf: np.asarray(leaf) + rank, ARRAYS), REST)
    mine = DataParallel().broadcast(everybodys)
    assert_close(eqx.filter(mine, eqx.is_array), jax.tree.map(np.asarray, ARRAYS))
    assert callable(mine.activation)
    expected = serial(loss_of_arrays, ARRAYS, rows)[1]
    dp, whole = (DataParallel(overlap=overlap, bucket_cap_mb=1e-4) for overlap in (True, False))
    assert_close(eqx.filter(dp.value_and_grad(loss)(mine, rows[rank])[1], eqx.is_array), expected, rtol=1e-4)
    assert_close(eqx.filter(whole.value_and_grad(loss)(mine, rows[rank])[1], eqx.is_array), expected, rtol=1e-4)
    within_jit = jax.jit(lambda x: dp.value_and_grad(loss)(mine, x)[1])(rows[rank])
    assert_close(eqx.filter(within_jit, eqx.is_array), expected, rtol=1e-4)
    with dp.no_sync():
        value, own = dp.value_and_grad(loss)(mine, rows[rank])
    found = serial(loss_of_arrays, ARRAYS, rows[rank : rank + 1])
    np.testing.assert_allclose(value, found[0], rtol=1e-5)
    assert_close(eqx.filter(own, eqx.is_array), found[1], rtol=1e-4)
    assert eqx.apply_updates(mine, own).activation is mine.activation


@on_every_worker
def test_functions_among_leaves_are_nowhere_in_the_way(big_world, rank, size):
    def loss_and_model(tree, x):
        return jnp.sum(tree["act"](tree["w"]) * x), tree

    dp = DataParallel(find_unused_parameters=True)
    tree = dp.broadcast({"w": jnp.arange(3.0) + rank, "unused": jnp.ones(2), "act": jnp.tanh})
    dp.verify(tree)
    step = dp.value_and_grad(loss_and_model, has_aux=True)
    (_, after), gradients = step(tree, 1.0 + rank)
    assert after["act"] is jnp.tanh
    assert gradients["act"] is None
    assert dp.used == {"w": True, "unused": False, "act": None}
    with dp.no_sync():
        _, own = step(tree, 1.0 + rank)
    assert_close(dp.average(own)["w"], gradients["w"])
    assert dp.used == {"w": True, "unused": False, "act": None}
