"""A parameter server: trainers compute in turn, each its next gradient while the other's is applied."""

import jax
import jax.numpy as jnp
import optax

import jdistgrad as jd

STEPS = 40


def data(trainer):  # a trainer's own
    x = jax.random.normal(jax.random.key(trainer), (32, 4))
    return x, jnp.tanh(x[:, 0] - x[:, 1])


@jax.jit
def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def gradient(params):
    return jax.grad(loss_fn)(params, *data(jd.rank()))


me = jd.init()
if me.rank == 0:
    params, tx = {"w": jnp.eye(4), "v": jnp.ones(4)}, optax.adam(0.05)
    state, trainers = tx.init(params), (1, 2)
    under_way = [jd.on(trainer, gradient).start(params) for trainer in trainers]
    for step in range(STEPS):
        turn = step % len(trainers)
        updates, state = tx.update(under_way[turn].result(), state)
        params = optax.apply_updates(params, updates)
        under_way[turn] = jd.on(trainers[turn], gradient).start(params)
    print(f"loss {sum(loss_fn(params, *data(trainer)) for trainer in trainers):.5f}")
jd.shutdown()
