"""The second example of PyTorch's distributed autograd note: parameters, gradients and optimizer on another worker.

Every worker trains two matrices that live on the next worker.

    jdistgrad run -n 2 examples/end_to_end.py
    python examples/end_to_end.py                          # the same as threads of one process
"""

import jax
import jax.numpy as jnp
import optax

import jdistgrad as jd

STEPS, RATE = 3, 0.05


def random_tensor(seed):
    return jax.random.uniform(jax.random.key(seed), (3, 3))


def loss_fn(rref1, rref2):
    return ((rref1.to_here() + rref2.to_here()) ** 2).sum()


def train(to, seeds):
    """Return the loss before each step, and both matrices after the last step."""
    rref1, rref2 = (jd.on(to, random_tensor).keep(seed) for seed in seeds)
    optimizer = jd.DistributedOptimizer(optax.sgd(RATE), [rref1, rref2])
    losses = []
    for _ in range(STEPS):
        with jd.context() as ctx:
            loss, _ = jd.backward(ctx, loss_fn, rref1, rref2)
            optimizer.step(ctx)
        losses.append(float(loss))
    return losses, [rref1.to_here(), rref2.to_here()]


def train_serially(seeds):
    values, losses = [random_tensor(seed) for seed in seeds], []
    for _ in range(STEPS):
        loss, gradients = jax.value_and_grad(lambda values: ((values[0] + values[1]) ** 2).sum())(values)
        values = [value - RATE * gradient for value, gradient in zip(values, gradients, strict=True)]
        losses.append(float(loss))
    return losses, values


def main():
    me = jd.init()
    seeds = 2 * me.rank, 2 * me.rank + 1
    result = train((me.rank + 1) % jd.world_size(), seeds), train_serially(seeds)
    (losses, values), (_, serial) = result
    same = all(jnp.allclose(one, other) for one, other in zip(values, serial, strict=True))
    print(f"{me}: loss {' -> '.join(f'{loss:.3f}' for loss in losses)}, the serial matrices: {same}", flush=True)
    jd.shutdown()
    return result


if __name__ == "__main__":
    main() if jd.launched() else jd.spawn(main, 2)
