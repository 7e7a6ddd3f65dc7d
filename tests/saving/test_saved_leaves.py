"""Single leaves of checkpoints: on which devices they come back, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jdistgrad as jd
from jdistgrad._compat import weakly_typed
from jdistgrad.saving import saved_leaves


def back(leaf):
    return saved_leaves.rebuilt(saved_leaves.described(leaf, "x"), saved_leaves.data(leaf), leaf)


def on(number, array):
    return jax.device_put(array, jax.devices()[number])


def uncommitted():
    with jax.default_device(jax.devices()[-1]):
        return jnp.arange(3.0)


PLACED = {
    "committed": lambda: on(-1, jnp.arange(3.0)),
    "committed to the first": lambda: on(0, jnp.arange(3.0)),
    "uncommitted": uncommitted,
    "weak": lambda: weakly_typed(on(-1, jnp.arange(3.0))),
    "key": lambda: on(-1, jax.random.key(3)),
    "keys": lambda: on(-1, jax.random.split(jax.random.key(3), 2)),
    "empty": lambda: on(-1, jnp.zeros((0, 2))),
    "default": lambda: jnp.arange(3.0),
}


@pytest.mark.parametrize("what", PLACED)
def test_a_leaf_comes_back_on_its_device(what):
    leaf = PLACED[what]()
    found = back(leaf)
    assert (found.sharding, found.committed) == (leaf.sharding, leaf.committed)
    assert jax.typeof(found) == jax.typeof(leaf)
    assert jnp.all(found == leaf)


@pytest.mark.parametrize("leaf", [np.array(["a", "b"]), np.zeros(2, "M8[D]"), np.zeros(2, [("a", "f4")])])
def test_what_files_cannot_hold_is_refused(leaf):
    with pytest.raises(jd.CheckpointError):
        saved_leaves.described(leaf, "trees['x']")


class Model:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self, x):
        return x


def test_an_object_that_holds_arrays_is_no_function():
    for leaf in (Model(jnp.ones(3)), Model({"inner": Model(np.ones(3))})):
        with pytest.raises(jd.CheckpointError, match=r"trees\['x'\] is a Model, which can be .* Register the class"):
            saved_leaves.check_function(leaf, "trees['x']")


def test_functions_and_what_is_made_of_them_may_stay():
    itself = Model(3)
    itself.parts = (itself,)
    schedule = optax.linear_schedule(jnp.ones(()), 0.0, 3)
    functions = jnp.tanh, jax.jit(jnp.tanh), jax.nn.relu, jnp.float32, schedule
    for leaf in (*functions, Model(schedule, "name"), nn.Dense(3), itself):
        saved_leaves.check_function(leaf, "trees['x']")
