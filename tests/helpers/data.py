"""Data of tests: comparing trees, drawing them at random, damaging bytes."""

import jax
import jax.numpy as jnp
import numpy as np


def close(found, expected, rtol=1e-5, atol=1e-6):
    """Check that trees have the same structure, shapes and dtypes, and values but for rounding in their dtype."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        assert jnp.result_type(one) == jnp.result_type(other)
        if jnp.result_type(other) != jax.dtypes.float0:
            least = 2e-2 if jnp.result_type(other).itemsize == 2 else 0
            np.testing.assert_allclose(*map(widened, (one, other)), rtol=max(rtol, least), atol=max(atol, least))


def widened(leaf):
    """A 16-bit float in a dtype that NumPy can compare."""
    return np.asarray(leaf, np.float32) if jnp.result_type(leaf) == jnp.bfloat16 else leaf


def random_like(tree, seed=0):
    """Random numbers in the place of a tree's floats; of other leaves, the cotangent JAX wants: float0."""
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
    """A scalar that no two leaves contribute to alike."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return sum((k + 1.5) * jnp.sum(jnp.abs(leaf) ** 2) for k, leaf in enumerate(floats))


def flipped(data, chance):
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwritten(data, chance):
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 16), len(data) - start)
    data[start : start + length] = chance.randbytes(length)


def blanked(data, chance):
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 64), len(data) - start)
    data[start : start + length] = bytes(length)


def moved(data, chance):
    start, to = sorted(chance.randrange(len(data)) for _ in range(2))
    data[start:to] = data[to - 1 : to] + data[start : to - 1]


def cut(data, chance):
    del data[chance.randrange(len(data)) :]


def extended(data, chance):
    data += chance.randbytes(chance.randint(1, 64))


def damaged(data, chance, begin=0):
    """The bytes with something wrong with them, behind ``begin``."""
    kept, changed = bytes(data[:begin]), bytearray(data[begin:])
    while changed == data[begin:]:
        chance.choice([flipped, overwritten, blanked, moved, cut, extended] if changed else [extended])(changed, chance)
    return kept + changed
