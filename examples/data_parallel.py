"""Data-parallel training: a flax model learns to read digits, each rank from its part of every batch.

The losses equal those of one process.

    jdistgrad run -n 3 examples/data_parallel.py
    python examples/data_parallel.py                       # the same as threads of one process

data_parallel_mesh.py does the same on the devices of a mesh.

The images are scikit-learn's; without scikit-learn, ten noisy patterns take their place.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jdistgrad as jd

STEPS, BATCH = 60, 96
OPTIMIZER = optax.adam(1e-2)


@functools.cache
def digits():
    """Return scikit-learn's images of 8 x 8 pixels and their digits; without scikit-learn, ten noisy patterns."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        random = np.random.default_rng(0)
        labels = random.integers(10, size=2000)
        images = random.random((10, 64))[labels] + random.normal(0, 0.3, (2000, 64))
    else:
        images, labels = load_digits(return_X_y=True)
        images = images / 16
    return images.astype("float32"), labels.astype("int32")


def batch(step, rank=0, size=1):
    """Return a rank's part of a step's batch."""
    images, labels = digits()
    rows = np.random.default_rng(step).integers(len(labels), size=BATCH)[rank::size]
    return images[rows], labels[rows]


MODEL = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])


def initial(seed=0):
    return MODEL.init(jax.random.key(seed), jnp.zeros((1, 64)))


def loss_fn(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(params, images), labels).mean()


@jax.jit
def update(params, state, gradients):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def fit(step, params):
    """Return the loss of each step, and the final parameters. ``step`` returns a value and gradients."""
    state, losses = OPTIMIZER.init(params), []
    for number in range(STEPS):
        loss, gradients = step(number, params)
        params, state = update(params, state, gradients)
        losses.append(float(loss))
    return losses, params


def accuracy(params):
    images, labels = digits()
    return float((MODEL.apply(params, images).argmax(-1) == labels).mean())


def train():
    dp = jd.DataParallel()
    rank, size = dp.collectives.rank, dp.collectives.size
    value_and_grad = dp.value_and_grad(loss_fn)

    def step(number, params):
        loss, gradients = value_and_grad(params, *batch(number, rank, size))
        return dp.collectives.allreduce(loss) / size, gradients

    losses, params = fit(step, dp.broadcast(initial(seed=rank)))
    dp.verify(params)
    if rank == 0:
        told, right = dp.statistics(), accuracy(params)
        print(f"{size} ranks: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {right:.1%} of the digits are read correctly")
        print(f"{told.bytes_reduced / told.steps / 1024:.1f} KiB a step in {len(told.bucket_sizes)} bucket(s)")
    return losses


def main():
    jd.init()
    losses = train()
    jd.shutdown()
    return losses


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
