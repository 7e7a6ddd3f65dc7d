"""A flax model with batch norm and dropout, and its serial step on everybody's inputs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from models import batch, serially as in_one_process

ROWS = 2


class Net(nn.Module):
    """Each row is dropped by a key of its own, so that a row is treated the same wherever it is."""

    norm: object

    @nn.compact
    def __call__(self, x, rows, train=True):
        x = self.norm(use_running_average=not train, name="norm")(nn.Dense(5)(x))
        drop = nn.Dropout(0.3, deterministic=not train)
        x = jax.vmap(lambda h, row: drop(h, rng=jax.random.fold_in(jax.random.key(0), row)))(nn.relu(x), rows)
        return nn.Dense(2)(x)


def inputs(rank):
    return batch(rank, ROWS), np.arange(rank * ROWS, (rank + 1) * ROWS)


def loss(norm, params, stats, x, rows):
    """A loss, and the batch statistics after it."""
    y, changed = Net(norm).apply({"params": params, "batch_stats": stats}, x, rows, mutable=["batch_stats"])
    return jnp.mean(y**2), changed["batch_stats"]


def evaluated(norm, variables, x, rows):
    return Net(norm).apply(variables, x, rows, train=False)


@functools.cache
def serially(size):
    """Initial variables; the loss, the statistics and the gradients of the step on everybody's inputs."""
    x, rows = (np.concatenate(parts) for parts in zip(*map(inputs, range(size)), strict=True))
    net = Net(nn.BatchNorm)
    variables = in_one_process(lambda x, rows: net.init(jax.random.key(0), x, rows, train=False), x, rows)
    step = jax.value_and_grad(functools.partial(loss, nn.BatchNorm), has_aux=True)
    (value, stats), gradients = in_one_process(step, variables["params"], variables["batch_stats"], x, rows)
    return variables, value, stats, gradients
