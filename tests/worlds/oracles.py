"""One program, run twice: with calls to other workers, and with none. What both find must be the same.

A program takes ``call``, the way to have a function run by a worker, as its first argument.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jdistgrad as jd


def rank(k):
    """A worker for the k-th call, in a world of any size."""
    return k % jd.world_size()


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
    """The result goes from its owner to a third worker, which hands it back."""
    rref = jd.remote(rank(to), function, args=args, kwargs=kwargs)
    return jd.rpc_sync(rank(to + 1), identity, args=(rref,))


WAYS = [sync, eventually, fetched, handed_on]


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


def same(found, expected, rtol=1e-5, atol=1e-6):
    """The same structure, shapes and dtypes, and values but for rounding."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(one) == jnp.shape(other)
        assert jnp.result_type(one) == jnp.result_type(other)
        if jnp.result_type(other) != jax.dtypes.float0:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def pulled_back(program, call, args, seed=0):
    """A program's results and the cotangents of its arguments, for random cotangents of the results."""
    results, pullback = jax.vjp(lambda *args: program(call, *args), *args)
    return results, pullback(random_like(results, seed))


def same_gradients(program, *args, call=sync, **tolerances):
    """Results and pullback of a program, against the serial one."""
    with jd.context():
        found = pulled_back(program, call, args)
    same(found, pulled_back(program, serial, args), **tolerances)


def sum_squares(tree):
    """A scalar that no two leaves contribute to alike."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return sum((k + 1.5) * jnp.sum(jnp.abs(leaf) ** 2) for k, leaf in enumerate(floats))
