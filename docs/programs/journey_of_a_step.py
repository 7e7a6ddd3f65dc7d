"""The program of docs/journey.md, its staged step: a staged step on three workers, its plan and its messages."""

import jax
import jax.numpy as jnp

import jdistgrad as jd


@jax.jit
def encode(w, x):
    return jnp.tanh(x @ w)


@jax.jit
def normalize(h):
    return h / jnp.linalg.norm(h, axis=1, keepdims=True)


@jax.jit
def head(v, h):
    return h @ v


def loss_fn(w, v, x, y):  # w on worker1, v on worker2
    h = jd.rpc_sync("worker1", encode, args=(w, x))
    h = jd.rpc_sync("worker1", normalize, args=(h,))
    out = jd.rpc_sync("worker2", head, args=(v, h))
    return jnp.mean((out - y) ** 2)


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape) / 2


def main():
    me = jd.init()
    if me.rank == 0:
        w = jd.remote("worker1", normal, args=(1, (3, 4)))
        v = jd.remote("worker2", normal, args=(2, (4, 2)))
        step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
        args = (w, v, jnp.eye(3) + 1, jnp.ones((3, 2)))
        with jd.context():
            print(step.plan(*args))
            loss, (of_w, of_v) = step(*args)
            print(f"loss {loss:.4f}; gradients on {of_w.owner} and {of_v.owner}")
    jd.shutdown()


if __name__ == "__main__":
    jd.spawn(main, 3)
