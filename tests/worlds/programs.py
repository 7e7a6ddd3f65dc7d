"""What the tests of gradients differentiate: functions for a worker to run, and arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from oracles import rank, same

import jdistgrad as jd

X = jnp.arange(1.0, 4.0)


def square(x):
    return x * x


def loss(x):
    return jd.rpc_sync(rank(1), square, args=(x,)).sum()


def still_differentiates():
    """In the context that is open, or else in one of its own."""
    same(jd.grad(loss)(X), 2 * X)


def layer(params, x, *, scale=1.0):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return {"h": h * scale, "pair": (jnp.sum(h**2), h[0] * 3)}


fast_layer = jax.jit(layer)


def parameters(n, m, seed=0):
    chance = np.random.default_rng(seed)
    return {"w": jnp.float32(chance.normal(size=(n, m))), "b": jnp.float32(chance.normal(size=m))}


def vector(n, seed=1):
    return jnp.float32(np.random.default_rng(seed).normal(size=n))


def product(x, y):
    return jnp.sin(x) * y


fast_product = jax.jit(product)
