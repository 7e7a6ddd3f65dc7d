"""Split learning: two clients have different features of the same people, worker0 has the labels and the head."""

import jax
import jax.numpy as jnp

import jdistgrad as jd

STEPS, RATE = 60, 0.3


def features(client):  # never leave the client
    return jax.random.normal(jax.random.key(client), (64, 2 + client))


def answers():
    return jnp.sign(features(1)[:, 0] + features(2)[:, 0])


def init(client):
    return jax.random.normal(jax.random.key(10 + client), (2 + client, 3)) / 2


@jax.jit
def encode(params, x):
    return jnp.tanh(x @ params)


def head_loss(head, hidden, labels):
    return jnp.mean((sum(hidden) @ head - labels) ** 2)


def loss_fn(encoders, head, inputs, labels):
    hidden = [jd.on(p.owner, encode).start(p, x) for p, x in zip(encoders, inputs, strict=True)]
    return head_loss(head, [one.result() for one in hidden], labels)


def descend(value, gradient):
    return value - RATE * gradient


me = jd.init()
if me.rank == 0:
    encoders, inputs = ([jd.on(client, make).keep(client) for client in (1, 2)] for make in (init, features))
    head, labels = jnp.ones(3), answers()
    step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
    for _ in range(STEPS):
        loss, gradients = step(encoders, head, inputs, labels)
        encoders, head = jd.tree_map(descend, (encoders, head), gradients)
    print(f"loss {loss:.5f}")
jd.shutdown()
