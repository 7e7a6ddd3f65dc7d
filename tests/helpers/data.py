"""Test data: functions that compare trees, and draw random trees."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def unaligned(shape, value):
    """Return an array of NumPy's that XLA copies before it runs a program, on a thread of its own."""
    size = math.prod(shape)
    whole = np.full(size + 1, value, np.float32)
    return whole[1 if whole.ctypes.data % 64 == 0 else 0 :][:size].reshape(shape)


def assert_close(found, expected, rtol=1e-5, atol=1e-6):
    """Check that two trees agree in structure, shapes and dtypes, and in values up to rounding in their dtypes."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        assert jnp.result_type(one) == jnp.result_type(other)
        if jnp.result_type(other) != jax.dtypes.float0:
            least = 2e-2 if jnp.result_type(other).itemsize == 2 else 0
            np.testing.assert_allclose(*map(widened, (one, other)), rtol=max(rtol, least), atol=max(atol, least))


def widened(leaf):
    """Convert a bfloat16 leaf to float32, which NumPy can compare; return any other leaf as it is."""
    return np.asarray(leaf, np.float32) if jnp.result_type(leaf) == jnp.bfloat16 else leaf


def random_like(tree, seed=0):
    """Draw random numbers in place of a tree's floats. Other leaves get zeros of dtype float0, JAX's cotangents."""
    chance = np.random.default_rng(seed)

    def draw(leaf):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
        found = chance.normal(size=jnp.shape(leaf))
        if jnp.issubdtype(dtype, jnp.complexfloating):
            found = found + 1j * chance.normal(size=jnp.shape(leaf))
        return jnp.asarray(found, dtype)

    return jax.tree.map(draw, tree)


def sum_squares(tree):
    """Return a weighted sum of squares, with a different weight for each leaf."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return sum((k + 1.5) * jnp.sum(jnp.abs(leaf) ** 2) for k, leaf in enumerate(floats))
