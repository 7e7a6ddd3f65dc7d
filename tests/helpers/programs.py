"""Functions for workers to run, and programs that run twice: with remote calls, and serially.

The first argument of such a program is ``call``, a function that runs another function on a worker.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd
from helpers.data import assert_close, random_like
from helpers.worlds import last, rank

X = jnp.array([0.3, -1.2, 2.0])
Y = jnp.array([1.0, -0.5])


def serial(to, function, *args, **kwargs):
    return function(*args, **kwargs)


def sync(to, function, *args, **kwargs):
    return jd.rpc_sync(rank(to), function, args=args, kwargs=kwargs)


def eventually(to, function, *args, **kwargs):
    return jd.rpc_async(rank(to), function, args=args, kwargs=kwargs).result()


def fetched(to, function, *args, **kwargs):
    return jd.remote(rank(to), function, args=args, kwargs=kwargs).to_here()


def identity(x):
    return x


def handed_on(to, function, *args, **kwargs):
    """Return the result after it has gone from its owner to another worker, which hands it back."""
    rref = jd.remote(rank(to), function, args=args, kwargs=kwargs)
    return jd.rpc_sync(rank(to + 1), identity, args=(rref,))


WAYS = [sync, eventually, fetched, handed_on]


def pulled_back(program, call, args, seed=0):
    """Return a program's results, and its arguments' cotangents for random cotangents of the results."""
    results, pullback = jax.vjp(lambda *args: program(call, *args), *args)
    return results, pullback(random_like(results, seed))


def assert_same_gradients(program, *args, call=sync, **tolerances):
    """Compare the results and the pullback of a program with its serial run."""
    with jd.context():
        found = pulled_back(program, call, args)
    assert_close(found, pulled_back(program, serial, args), **tolerances)


def square(x):
    return x * x


def loss(x):
    return jd.rpc_sync(rank(1), square, args=(x,)).sum()


def still_differentiates():
    """Check a gradient, in the context that is open, or else in a context of its own."""
    assert_close(jd.grad(loss)(X), 2 * X)


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


@jax.jit
def affine(params, x):
    return params["w"] @ x + params["b"]


@jax.jit
def mix(x, y):
    return jnp.sin(x) * y


def as_written(x, y):
    return jnp.cos(x) * y


def make_params(seed):
    w, b = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(w, (2, 3)), "b": jax.random.normal(b, (2,))}


def holding(held):
    """Return a value that holds a reference."""
    return {"held": held, "w": jnp.arange(3.0)}


def references():
    return jd.remote(last(), make_params, args=(1,)), jd.remote(0, make_params, args=(2,))
