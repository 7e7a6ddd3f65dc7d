"""The functions of random programs: each takes two arrays that broadcast, and works on them element by element.

They stand at the top level and are few, so that every worker finds them and JAX compiles them once per shape.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torture import containers


def mix(a: Any, b: Any) -> Any:
    return jnp.sin(a) * b + 0.5 * a


def bend(a: Any, b: Any) -> Any:
    return jnp.tanh(a * b) - b


def many(a: Any, b: Any) -> Any:
    """Run enough operations for XLA to divide among its threads, if the arrays are large."""
    return sum(jnp.sin(a * (k / 40)) + 0.1 * jnp.cos(b * (k / 40)) for k in range(1, 41)) / 20


# What is mapped over values on their owners.


def averaged(a: Any, b: Any) -> Any:
    return 0.9 * a + 0.1 * b


def masked(a: Any, b: Any) -> Any:
    return jnp.where(b > 0, a, 0.5 * b)


def squared(a: Any) -> Any:
    return jnp.sum(a**2)


# Custom rules that are not the true derivative: JAX's way to do what PyTorch does by hooks on gradients. Second
# derivatives show whether the recorded call is differentiated as the rule's forward pass, or as the function again.


@jax.custom_vjp
def reversed_gradient(x: Any) -> Any:
    return 2 * x


reversed_gradient.defvjp(lambda x: (2 * x, x), lambda x, g: (-g * x,))


@jax.custom_vjp
def surrogate(x: Any) -> Any:
    return jnp.sin(x)


surrogate.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(2 * x),))


@jax.custom_vjp
def squashed_gradient(x: Any) -> Any:
    return x


squashed_gradient.defvjp(lambda x: (x, ()), lambda _, g: (g / (1 + g * g),))


def turned(a: Any, b: Any) -> Any:
    return reversed_gradient(a) * jnp.cos(b)


def guessed(a: Any, b: Any) -> Any:
    return surrogate(a * b) + 0.5 * b


def squashed(a: Any, b: Any) -> Any:
    return jnp.sin(squashed_gradient(a)) * b


# Functions that depend on dtypes: a number that has lost its weak type, or a wider array, gives other results.


def scaled(a: Any, b: Any) -> Any:
    return a * b


def by_width(a: Any, b: Any) -> Any:
    product = a * b
    return jnp.sin(product) * (product.dtype.itemsize / 4) + 0.5 * a


# Functions that do not return a single array: ``finish`` makes one of their results, on any worker.


def inside(tree: Any) -> Any:
    """Return a container like the given one, around other arrays."""
    a, b = containers.floats(tree)
    return containers.refilled(tree, mix(a, b), bend(b, a))


def noisy(a: Any, b: Any, key: Any) -> Any:
    mine, after = jax.random.split(key)
    return jnp.sin(a) * b + 0.1 * jax.random.normal(mine, jnp.shape(a), jnp.result_type(a)), after


def finish(result: Any) -> Any:
    """Return one array, made from the result of any function of the palette."""
    if isinstance(result, jax.Array | np.ndarray | np.generic):
        return result
    drawn = [leaf for leaf in jax.tree.leaves(result) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    total = sum((0.5 * k + 1) * leaf for k, leaf in enumerate(containers.floats(result)))
    return total + sum(0.1 * jax.random.normal(key, jnp.shape(total), total.dtype) for key in drawn)


fast_mix, fast_bend, fast_many = jax.jit(mix), jax.jit(bend), jax.jit(many)
fast_turned, fast_guessed, fast_squashed = jax.jit(turned), jax.jit(guessed), jax.jit(squashed)
fast_scaled, fast_by_width = jax.jit(scaled), jax.jit(by_width)
fast_inside, fast_noisy = jax.jit(inside), jax.jit(noisy)

PLAIN = ("mix", "bend")
ODD_RULES = ("turned", "guessed", "squashed")
OF_TYPES = ("scaled", "by_width")


def function(name: str) -> Any:
    """Return a function of this module by its name."""
    return globals()[name]


def drawn(seed: Sequence[int], shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return an array of a program, the same on every worker; its dtype is by default JAX's widest float."""
    numbers = np.random.default_rng(list(seed)).uniform(-1, 1, size=shape)
    return jnp.asarray(numbers, dtype or jnp.result_type(float))
