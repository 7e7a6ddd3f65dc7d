"""Parameters on two workers, for the tests of optimizers."""

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd

X = jnp.array([0.3, -1.2, 2.0])
Y = jnp.array([1.0, -0.5])


def make_params(seed):
    w, b = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(w, (2, 3)), "b": jax.random.normal(b, (2,))}


@jax.jit
def affine(params, x):
    return params["w"] @ x + params["b"]


def last():
    return jd.world_size() - 1


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


def references():
    return jd.remote(last(), make_params, args=(1,)), jd.remote(0, make_params, args=(2,))
