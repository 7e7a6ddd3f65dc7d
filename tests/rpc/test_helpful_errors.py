"""Errors for what users write first say what to write instead, and completion shows what users use."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.programs import X, layer, parameters
from helpers.worlds import on_worker0, rank

import jdistgrad as jd


@dataclasses.dataclass
class Batch:
    x: jax.Array


def of_batch(batch):
    return jnp.sum(batch.x**2)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jd.grad], ids=["grad", "jit", "jd"])
@on_worker0
def test_an_array_in_an_object_that_jax_does_not_know(world, transform):
    with jd.context(), pytest.raises(jd.EncodingError, match="register_dataclass"):
        transform(lambda x: jd.rpc_sync(rank(1), of_batch, args=(Batch(x),)))(X)
    with jd.context(), pytest.raises(jd.EncodingError, match=r"jax\.tree_util\.Partial"):
        transform(lambda x: jd.rpc_sync(rank(1), functools.partial(jnp.dot, x), args=(X,)))(X)


def owner_of(reference):
    return reference.owner.name


@on_worker0
def test_a_function_that_wanted_the_reference_itself(world):
    reference = jd.remote(rank(1), parameters, args=(3, 2))
    with pytest.raises(AttributeError) as caught:
        jd.rpc_sync(rank(1), owner_of, args=(reference,))
    assert any("jd.by_reference(reference)" in note for note in caught.value.__notes__)
    assert jd.rpc_sync(rank(1), owner_of, args=(jd.by_reference(reference),)) == reference.owner.name
    with jd.context(), pytest.raises(AttributeError) as caught:
        jd.grad(lambda p: jd.rpc_sync(rank(1), owner_of, args=(p,)))(reference)
    assert any("jd.by_reference(reference)" in note for note in caught.value.__notes__)


@on_worker0
def test_completion_shows_what_users_use(world):
    assert dir(jd.collectives) == ["Collectives", "Devices", "Local", "MPI", "Mesh", "of_this_world"]
    assert {"Stage", "one_f_one_b", "Schedule"} <= set(dir(jd.pipeline))
    assert not {"stages", "plans", "shares"} & set(dir(jd.pipeline))
    assert {"int8", "Hook"} <= set(dir(jd.hooks))
    assert "base" not in dir(jd.hooks)
    reference = jd.remote(rank(1), parameters, args=(3, 2))
    module = jd.RemoteFunction(rank(1), parameters, layer, args=(3, 2))
    assert {"to_here", "owner", "rpc_sync"} <= set(dir(reference))
    for one in (reference, module):
        assert not {"handle", "token", "corrections", "traced_part"} & set(dir(one))
    with jd.context() as ctx:
        assert "graph" in dir(ctx)
        assert not {"tape", "corrections"} & set(dir(ctx))
