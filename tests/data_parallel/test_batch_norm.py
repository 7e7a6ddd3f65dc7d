"""Batch norm over everybody's rows, against flax's own on the whole batch."""

import functools

import flax.linen as nn
import flax_step
import jax
import jax.numpy as jnp
import numpy as np
from models import close, on_all, serially

from jdistgrad.data_parallel.batch_norm import SyncBatchNorm, batch_statistics
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.parallel import DataParallel


def test_batch_norm_over_unequal_and_empty_batches(big_world):
    def body(rank, size):
        c = of_this_world()
        x = [np.random.default_rng(r).normal(r, 1 + r, size=(3 * r, 4)).astype("float32") for r in range(size)]
        whole = np.concatenate(x)
        mean, var = jax.jit(lambda x: batch_statistics(x, c))(jnp.asarray(x[rank]))
        np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(var, whole.var(0), rtol=1e-5, atol=1e-5)

    on_all(big_world, body)


def test_flax_with_batch_norm_and_dropout(world):
    """Against flax's own batch norm on the whole batch, in training and in evaluation."""
    variables, expected_loss, expected_stats, expected = flax_step.serially(world.size)

    def body(rank, size):
        dp = DataParallel()
        norm = functools.partial(SyncBatchNorm, dp.collectives)
        mine = dp.broadcast(jax.tree.map(lambda leaf: jnp.asarray(leaf + rank), variables))
        step = dp.value_and_grad(functools.partial(flax_step.loss, norm), has_aux=True)
        (value, new), gradients = step(mine["params"], mine["batch_stats"], *flax_step.inputs(rank))
        close(gradients, expected, 1e-4)
        close(new, expected_stats, 1e-4)
        np.testing.assert_allclose(dp.collectives.allreduce(value) / size, expected_loss, rtol=1e-5)
        after, x = {"params": variables["params"], "batch_stats": new}, flax_step.inputs(rank)
        plain = serially(functools.partial(flax_step.evaluated, nn.BatchNorm), after, *x)
        close(jax.jit(functools.partial(flax_step.evaluated, norm))(after, *x), plain)

    on_all(world, body)
