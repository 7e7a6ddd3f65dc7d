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


def test_what_may_stand_for_each_other():
    ones = LeafSpec.of(jnp.ones(2))
    assert not ones.differs_from(LeafSpec.of(np.ones(2)))  # which JAX makes float32 without x64
    assert not ones.differs_from(LeafSpec.of(jax.ShapeDtypeStruct((2,), np.float32, weak_type=True)))
    assert ones.differs_from(LeafSpec.of(jnp.ones(3)))
    assert ones.differs_from(LeafSpec.of(jnp.ones(2, jnp.float16)))
    assert LeafSpec.of(LEAVES["key<rbg>[2]"]).differs_from(LeafSpec.of(jax.random.split(jax.random.key(0))))
    assert LeafSpec.of(2.0).zeros().weak_type
