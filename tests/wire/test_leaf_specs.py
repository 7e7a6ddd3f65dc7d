"""Descriptions of leaves: what plain data do not tell, and the leaf made of both again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad._compat import weakly_typed
from jdistgrad.leaves import LeafSpec, plain

LEAVES = {
    "float32[2]": jnp.ones(2),
    "bfloat16[]": jnp.ones((), jnp.bfloat16),
    "int32[3]": weakly_typed(jnp.ones(3, jnp.int32)),
    "key<rbg>[2]": jax.random.split(jax.random.key(0, impl="rbg")),
}


@pytest.mark.parametrize("spelled", LEAVES)
def test_a_leaf_is_made_again_of_its_plain_data(spelled):
    leaf = LEAVES[spelled]
    spec = LeafSpec.of(leaf)
    made = spec.restored(np.asarray(plain(leaf)))
    assert str(spec) == spelled
    assert (made.aval, LeafSpec.of(made)) == (leaf.aval, spec)
    np.testing.assert_array_equal(plain(made), plain(leaf))


def test_a_python_number_is_weakly_typed():
    assert LeafSpec.of(2.0).zeros().weak_type
