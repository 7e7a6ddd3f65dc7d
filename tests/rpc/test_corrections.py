"""What references and futures answer to uses that they do not have, and that this costs nothing to those they have."""

import copy
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.worlds import make, on_worker0, rank

import jdistgrad as jd
from jdistgrad.corrections import COMPARISONS, OPERATORS

pytestmark = pytest.mark.world(1, 3)


@on_worker0
def test_every_operator_is_refused_from_both_sides(world):
    reference = jd.remote(rank(1), make, args=(3,))
    for name, symbol in {**OPERATORS, **COMPARISONS}.items():
        for other in (2, np.float32(2), np.ones(3), jnp.ones(3)):
            for operands in ((reference, other), (other, reference)):
                with pytest.raises(TypeError, match=r"is not the value itself: it has no operator") as caught:
                    getattr(operator, name)(*operands)
                assert symbol in str(caught.value) or name in COMPARISONS  # Python turns comparisons around
    del caught


@on_worker0
def test_a_reference_can_still_be_compared_hashed_copied_and_tested(world):
    reference, other = (jd.remote(rank(1), make, args=(3,)) for _ in range(2))
    assert reference == copy.deepcopy(reference) != other
    assert {reference: 1, other: 2}[reference] == 1
    assert bool(reference)
    assert not hasattr(reference, "shape")
    assert not hasattr(reference, "__jax_array__")


@on_worker0
def test_optax_cannot_map_over_a_reference(world):
    reference = jd.remote(rank(1), make, args=(3,))
    for tree in (reference, {"a": jnp.ones(2), "b": reference}):
        with pytest.raises(TypeError, match="optax cannot work on a reference"):
            optax.sgd(0.1, momentum=0.9).init(tree)


@on_worker0
def test_a_function_that_optax_calls_may_use_references(world):
    of_optax = {"__name__": "optax.some_module"}
    exec("def call(function, *args): return function(*args)", of_optax)
    reference = jd.remote(rank(1), make, args=(3,))
    mapped = of_optax["call"](lambda: jax.jit(lambda r: r)(reference))
    assert mapped == reference


@on_worker0
def test_a_reference_in_a_jitted_function_stays_one(world):
    reference = jd.remote(rank(1), make, args=(3,))
    assert jax.jit(lambda r: r)(reference) == reference
