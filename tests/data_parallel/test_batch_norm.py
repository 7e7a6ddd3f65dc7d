"""Batch norm over the rows of all ranks, compared with flax's own on the whole batch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from helpers.data import assert_close
from helpers.models import net_evaluated, net_inputs, net_loss, net_serially, serially
from helpers.worlds import on_every_worker

from jdistgrad.data_parallel.batch_norm import SyncBatchNorm, batch_statistics
from jdistgrad.data_parallel.collectives.default import of_this_world
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
