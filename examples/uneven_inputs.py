"""Data-parallel training of ranks with different numbers of batches, by ``join``.

Rank r has 10 + 5 r batches. A rank that has run out takes part with zeros until all ranks have run out. A step's
gradient is the average over the ranks that still have a batch.

    jdistgrad run -n 3 examples/uneven_inputs.py
    python examples/uneven_inputs.py                       # the same as threads of one process
"""

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd

RATE, ROWS, FEATURES = 0.2, 16, 5
TRUTH = np.arange(FEATURES) - 2.0


def batches(rank):
    """Yield one rank's batches."""
    random = np.random.default_rng(rank)
    for _ in range(10 + 5 * rank):
        x = random.normal(size=(ROWS, FEATURES)).astype("float32")
        yield x, (x @ TRUTH + random.normal(0, 0.01, ROWS)).astype("float32")


def loss_fn(weights, x, y):
    return jnp.mean((x @ weights - y) ** 2)


def train():
    """Return the weights after the last step of all ranks, the same on every rank."""
    dp = jd.DataParallel()
    step, weights = dp.value_and_grad(loss_fn), jnp.zeros(FEATURES)
    with dp.join(divide_by_initial_world_size=False) as join:
        for x, y in batches(dp.collectives.rank):
            _, gradient = step(weights, x, y)
            weights = weights - RATE * gradient
        weights = join.finish(weights)  # waits until all ranks have run out; returns the last rank's weights
    dp.verify(weights)
    return weights


def train_serially(size):
    weights, inputs = jnp.zeros(FEATURES), [list(batches(rank)) for rank in range(size)]
    gradient = jax.jit(jax.grad(loss_fn))
    for number in range(len(inputs[-1])):
        active = [mine[number] for mine in inputs if number < len(mine)]
        weights = weights - RATE * sum(gradient(weights, x, y) for x, y in active) / len(active)
    return weights


def main():
    me = jd.init()
    weights = train()
    if me.rank == 0:
        same = np.allclose(weights, train_serially(jd.world_size()), atol=1e-5)
        print(f"weights {np.round(weights, 2)}, the serial ones: {same}")
    jd.shutdown()
    return weights


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 3)
