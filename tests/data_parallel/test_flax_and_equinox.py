"""Modules of flax.nnx and equinox in data-parallel steps, compared with the same modules in one process."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.data import assert_close
from helpers.models import serially
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel.batch_norm import NnxSyncBatchNorm
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.parallel import DataParallel


def rows_of(rank):
    return np.random.default_rng(rank).normal(rank, 1 + rank, size=(2 + 3 * rank, 4)).astype("float32")


def run(graph, weights, rest, x):
    """Return the sum of squares of a module's results, and the other variables after the call."""
    module = nnx.merge(graph, weights, rest, copy=True)
    return jnp.sum(jnp.sin(module(x)) ** 2), nnx.state(module, nnx.Not(nnx.Param))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.6, "use_scale": False}, {"use_bias": False, "epsilon": 0.1}])
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


@on_every_worker
def test_batch_norm_of_nnx_has_its_axis_and_its_ranks(world, rank, size):
    with pytest.raises(TypeError):
        NnxSyncBatchNorm(4, of_this_world(), axis_name="batch", rngs=nnx.Rngs(0))


def model(seed):
    return eqx.nn.MLP(4, 2, 6, 2, key=jax.random.key(seed))


def loss(model, x):
    return jnp.mean(jnp.sum(jax.vmap(model)(x) ** 2, -1))


@pytest.mark.parametrize("overlap", [False, True])
@on_every_worker
def test_a_step_of_an_equinox_module(big_world, overlap, rank, size):
    dp = DataParallel(overlap=overlap, bucket_cap_mb=1e-4)
    mine = dp.broadcast(model(rank))
    assert_close(eqx.filter(mine, eqx.is_array), eqx.filter(model(0), eqx.is_array))
    assert mine.activation is model(0).activation or callable(mine.activation)
    value, gradients = dp.value_and_grad(loss)(mine, rows_of(rank))
    np.testing.assert_allclose(value, loss(mine, rows_of(rank)), rtol=1e-5)
    parts = [eqx.filter_grad(loss)(mine, rows_of(k)) for k in range(size)]
    assert_close(gradients, jax.tree.map(lambda *g: sum(g) / size, *parts), rtol=1e-4)
    within_jit = jax.jit(lambda x: dp.value_and_grad(loss)(mine, x)[1])(rows_of(rank))
    assert_close(within_jit, gradients, rtol=1e-4)
    with dp.no_sync():
        assert_close(dp.value_and_grad(loss)(mine, rows_of(rank))[1], parts[rank], rtol=1e-4)
    moved = eqx.apply_updates(mine, jax.tree.map(lambda g: -0.1 * g, gradients))
    assert loss(moved, rows_of(rank)).shape == ()


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
