"""An equinox model on every rank, each with its share of the batch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jdistgrad as jd

STEPS = 40


def batch(step):
    x = jax.random.normal(jax.random.key(step), (48, 3))
    return x, jnp.tanh(x.sum(axis=1, keepdims=True))


def loss_fn(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


me = jd.init()
dp, tx = jd.DataParallel(), optax.adam(1e-2)
model = dp.broadcast(eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(me.rank)))
step, state = dp.value_and_grad(loss_fn), tx.init(eqx.filter(model, eqx.is_inexact_array))
for k in range(STEPS):
    mine = [array[me.rank :: jd.world_size()] for array in batch(k)]
    loss, gradients = step(model, *mine)
    updates, state = tx.update(gradients, state)
    model = eqx.apply_updates(model, updates)
if me.rank == 0:
    print(f"loss {loss_fn(model, *batch(STEPS)):.5f}")
jd.shutdown()
