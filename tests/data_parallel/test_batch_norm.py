"""Batch norm over the rows of all ranks, compared with flax's own on the whole batch."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.data import assert_close
from helpers.models import net_evaluated, net_inputs, net_loss, net_serially, serially
from helpers.worlds import on_every_worker

from jdistgrad.collectives.default import of_this_world
from jdistgrad.data_parallel.batch_norm import NnxSyncBatchNorm, SyncBatchNorm, batch_statistics
from jdistgrad.data_parallel.parallel import DataParallel


@on_every_worker
def test_batch_norm_over_unequal_and_empty_batches(big_world, rank, size):
    c = of_this_world()
    x = [np.random.default_rng(r).normal(r, 1 + r, size=(3 * r, 4)).astype("float32") for r in range(size)]
    whole = np.concatenate(x)
    mean, var = jax.jit(lambda x: batch_statistics(x, c))(jnp.asarray(x[rank]))
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(var, whole.var(0), rtol=1e-5, atol=1e-5)


@on_every_worker
def test_flax_with_batch_norm_and_dropout(world, rank, size):
    # Compare with flax's own batch norm on the whole batch, in training and in evaluation.
    variables, expected_loss, expected_stats, expected = net_serially(world.size)
    dp = DataParallel()
    norm = functools.partial(SyncBatchNorm, dp.collectives)
    mine = dp.broadcast(jax.tree.map(lambda leaf: jnp.asarray(leaf + rank), variables))
    step = dp.value_and_grad(functools.partial(net_loss, norm), has_aux=True)
    (value, new), gradients = step(mine["params"], mine["batch_stats"], *net_inputs(rank))
    assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    assert_close(new, expected_stats, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dp.collectives.allreduce(value) / size, expected_loss, rtol=1e-5)
    after, x = {"params": variables["params"], "batch_stats": new}, net_inputs(rank)
    plain = serially(functools.partial(net_evaluated, nn.BatchNorm), after, *x)
    assert_close(jax.jit(functools.partial(net_evaluated, norm))(after, *x), plain)


def of_linen(norm, x):
    layer, frozen = norm(use_running_average=False), norm(use_running_average=True)
    y, new = layer.apply(layer.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    return y, new["batch_stats"], frozen.apply(frozen.init(jax.random.key(0), x) | new, x)


def of_nnx(norm, x):
    layer = norm(x.shape[-1], rngs=nnx.Rngs(0))
    y = layer(x)
    return y, {"mean": layer.mean[...], "var": layer.var[...]}, layer(x, use_running_average=True)


@on_every_worker
def test_batch_norm_where_jax_adds_no_dimensions(big_world, rank, size):
    x = jnp.arange(24.0).reshape(2, 3, 4) * (rank + 1)
    norm = functools.partial(SyncBatchNorm, collectives=of_this_world())
    expected = of_linen(norm, x)
    with jax.numpy_rank_promotion("raise"):
        assert_close(of_linen(norm, x), expected)


@on_every_worker
def test_the_variance_of_complex_numbers_is_real(big_world, rank, size):
    c, rng = of_this_world(), np.random.default_rng(0)
    whole = (rng.normal(size=(3 * size, 2)) + 1j * rng.normal(1, 2, size=(3 * size, 2))).astype("complex64")
    mine = whole[3 * rank : 3 * rank + 3]

    def spread(x):
        mean, variance = batch_statistics(x, c)
        return variance.sum() / size, (mean, variance)  # every rank counts it

    gradient, found = jax.jit(jax.grad(spread, has_aux=True))(mine)
    expected, moments = serially(spread_of_all, whole)
    assert_close(found, moments)
    assert_close(gradient, expected[3 * rank : 3 * rank + 3])


@functools.partial(jax.grad, has_aux=True)
def spread_of_all(x):
    return x.var(0).sum(), (x.mean(0), x.var(0))


@pytest.mark.parametrize(("given", "dtype"), [("float16", None), ("float32", "bfloat16"), ("bfloat16", "float32")])
@on_every_worker
def test_dtypes_are_those_of_flax(big_world, given, dtype, rank, size):
    c, rows = of_this_world(), slice(3 * rank, 3 * rank + 3)
    whole = jnp.asarray(np.random.default_rng(0).normal(1, 2, size=(3 * size, 4)), given)
    linen = of_linen, nn.BatchNorm, functools.partial(SyncBatchNorm, c)
    on_nnx = of_nnx, nnx.BatchNorm, functools.partial(NnxSyncBatchNorm, collectives=c)
    without = {"use_bias": False, "param_dtype": "bfloat16"}, {"use_scale": False, "use_bias": False}
    for (run, *layers), settings in itertools.product((linen, on_nnx), ({"use_fast_variance": False}, *without)):
        plain, synchronous = (functools.partial(layer, dtype=dtype, **settings) for layer in layers)
        y, statistics, frozen = run(plain, whole)
        found = run(synchronous, whole[rows])
        assert_close(found, (y[rows], statistics, frozen[rows]), rtol=1e-5, atol=1e-5)


@on_every_worker
def test_initializers_are_those_of_flax(big_world, rank, size):
    # As in ResNets: the last layer of a residual block begins with a scale of zero.
    settings = {"scale_init": nn.initializers.zeros, "bias_init": nn.initializers.normal()}
    mine, flax = (
        norm(name="norm", use_running_average=False, **settings).init(jax.random.key(0), jnp.ones((2 + rank, 3)))
        for norm in (functools.partial(SyncBatchNorm, of_this_world()), nn.BatchNorm)
    )
    assert_close(mine, flax)


@on_every_worker
def test_all_settings_are_those_of_flax_but_for_the_axis(world, rank, size):
    mine, flax = ({one.name for one in dataclasses.fields(kind)} for kind in (SyncBatchNorm, nn.BatchNorm))
    assert flax - mine == {"axis", "axis_name", "axis_index_groups"}


@pytest.mark.parametrize("make", [SyncBatchNorm, lambda given: NnxSyncBatchNorm(3, given, rngs=nnx.Rngs(0))])
def test_what_is_no_group_of_ranks_is_refused_when_the_layer_is_made(make):
    with pytest.raises(TypeError):
        make(64)


def test_batch_norm_of_nnx_has_its_axis_and_its_ranks():
    with pytest.raises(TypeError):
        NnxSyncBatchNorm(4, None, axis_name="batch", rngs=nnx.Rngs(0))
