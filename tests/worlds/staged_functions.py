"""Functions that staged steps call, and how their numbers are compared."""

import jax
import jax.numpy as jnp
import numpy as np

X = jnp.array([0.3, -1.2, 2.0])


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


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
