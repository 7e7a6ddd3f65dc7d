"""Modules and functions with parameters, for the tests of those that live on another worker."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

X = jnp.linspace(-1, 1, 8).reshape(2, 4)

traced = []


class Encoder(nn.Module):
    """Says when it is traced."""

    width: int
    layers: tuple = ()

    @nn.compact
    def __call__(self, x, *, double=False):
        traced.append(x.shape)
        for layer in self.layers:
            x = layer(x)
        y = nn.tanh(nn.Dense(self.width)(x))
        return 2 * y if double else y


def count_traces(rank):
    found = list(traced)
    traced.clear()
    return found


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(3)(x))
        return nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)


class Both(nnx.Module):
    """Parameters, statistics and a random generator."""

    def __init__(self, inputs, outputs, *, rngs):
        self.first = nnx.Linear(inputs, outputs, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x, double=False):
        y = self.drop(self.norm(jnp.tanh(self.first(x))))
        return 2 * y if double else y


class Line(nnx.Module):
    """What is made of nothing but ``rngs``."""

    def __init__(self, rngs):
        self.only = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.only(x))


def init_line(slope):
    return {"slope": jnp.float32(slope), "offset": jnp.ones(4)}


def line(params, x, *, scale=1.0):
    return scale * params["slope"] * x + params["offset"]


compiled_line = jax.jit(line)


def assert_trees_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def squares(function, x):
    return jnp.sum(function(x) ** 2)
