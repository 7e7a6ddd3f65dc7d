"""Models and data for the tests, and the serial program that everything is compared with."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd

SMALL = 2e-4  # MiB: a layer of the model below


def on_all(world, body, *args):
    """``body(rank, size, *args)`` on every worker of a world; the results that this process sees."""

    def main():
        me = jd.init()
        result = body(me.rank, jd.world_size(), *args)
        jd.shutdown()
        return result

    return world.run(main)


def parameters(seed=0):
    """Several dtypes, ranks of tensor and sizes; one leaf is empty, one a scalar."""

    def draw(k, *shape, dtype=jnp.float32):
        return jnp.asarray(np.random.default_rng([seed, k]).normal(size=shape) / 2, dtype)

    return {
        "dense": [{"w": draw(k, 6, 6), "b": draw(10 + k, 6)} for k in range(3)],
        "half": draw(20, 6, 2, dtype=jnp.bfloat16),
        "empty": draw(25, 0, 3),
        "scale": draw(30),
    }


def batch(rank, rows=4, seed=7):
    return np.random.default_rng([seed, rank]).normal(size=(rows, 6)).astype("float32")


def loss(params, x):
    h = x
    for layer in params["dense"]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    y = (h @ params["half"].astype(jnp.float32)) * params["scale"]
    return jnp.mean(y**2) + params["empty"].sum()


_one_at_a_time = threading.Lock()


def serially(function, *args):
    """What a function gives in one process, as NumPy arrays: compiled once for the workers of all devices."""
    with _one_at_a_time, jax.default_device(jax.local_devices()[0]):
        return jax.tree.map(np.asarray, compiled(function)(*jax.tree.map(np.asarray, args)))


compiled = functools.cache(jax.jit)


def serial(loss, params, batches):
    """Value and gradients of the mean of the losses."""
    return serially(mean_of(loss), params, batches)


@functools.cache
def mean_of(loss):
    return jax.value_and_grad(lambda params, batches: sum(loss(params, x) for x in batches) / len(batches))


@functools.cache
def gradient(loss):
    return jax.jit(jax.grad(loss))


@jax.jit
def descend(params, gradients, rate=0.1):
    return jax.tree.map(lambda p, g: p - (rate * g).astype(p.dtype), params, gradients)


def close(got, expected, tolerance=1e-5):
    """Compare trees: float32 to the tolerance, 16-bit floats to their own."""

    def compare(a, b):
        assert a.dtype == b.dtype
        wide = 2e-2 if b.dtype == jnp.bfloat16 else tolerance
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=wide, atol=wide)

    jax.tree.map(compare, got, expected)
