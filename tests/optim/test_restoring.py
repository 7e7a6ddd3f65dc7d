"""Restored optimizer states: checked on all owners first, then restored on all owners or on none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.programs import X, holding, references
from helpers.worlds import last, on_worker0

import jdistgrad as jd


def make_with_key(seed):
    return {"w": jnp.arange(6.0).reshape(2, 3) + seed, "key": jax.random.key(seed), "b": jnp.ones(2), "name": "n"}


def affine_of(params, x):
    return params["w"] @ x + params["b"]


def make_array(shape, dtype="float32"):
    return jnp.full(shape, 0.5, dtype)


def changed(state, number, **leaves):
    """Return a state in which leaves of one value are changed or added."""
    values = [{**one, **leaves} if k == number else one for k, one in enumerate(state["values"])]
    return {**state, "values": values}


def drop(state, number, name):
    values = [dict(one) for one in state["values"]]
    del values[number][name]
    return {**state, "values": values}


def other_moments(state, change):
    adam, scaled = state["state"]
    return {**state, "state": (adam._replace(mu=[adam.mu[0], jax.tree.map(change, adam.mu[1])]), scaled)}


# Changes that spoil a state. The first value lives on the last worker, the second on worker 0.
WRONG = {
    "shape": lambda s: changed(s, 1, w=jnp.ones((2, 4))),
    "dtype": lambda s: changed(s, 0, b=jnp.ones(2, jnp.bfloat16)),
    "wider": lambda s: changed(s, 0, b=np.ones(2)),
    "no array": lambda s: changed(s, 1, b="text"),
    "a leaf less": lambda s: drop(s, 1, "w"),
    "a leaf more": lambda s: changed(s, 1, x=jnp.ones(1)),
    "another tree": lambda s: {**s, "values": [s["values"][0], 1.0]},
    "moments": lambda s: other_moments(s, lambda leaf: jnp.ones((7, *leaf.shape))),
}


@on_worker0
def test_what_does_not_fit_is_refused_and_nothing_is_restored_anywhere(world):
    refs = references()
    optimizer = jd.DistributedOptimizer(optax.adam(1e-2), refs)
    before = optimizer.state()
    shifted = jax.tree.map(lambda leaf: leaf + 1, before)
    for spoil in WRONG.values():
        with pytest.raises(ValueError, match=r"restore on worker\d+ \(rank \d+\): .*\[.*expected"):
            optimizer.restore(spoil(shifted))
        jax.tree.map(np.testing.assert_array_equal, optimizer.state(), before)
    optimizer.restore(shifted)
    jax.tree.map(np.testing.assert_array_equal, optimizer.state(), shifted)


@on_worker0
def test_what_is_no_state_is_refused(world):
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), references())
    for saved in ({}, {"values": []}, [1, 2], {"values": [1.0], "state": ()}):
        with pytest.raises(ValueError):
            optimizer.restore(saved)


@on_worker0
def test_random_keys_are_restored_among_values_and_in_states(world):
    """Values and moments are restored, and the restored keys lead to the same random numbers again."""
    tx = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.adam(1e-2))
    params = jd.remote(last(), make_with_key, args=(5,))
    optimizer = jd.DistributedOptimizer(tx, [params])

    def train():
        with jd.context() as ctx:
            jd.grad(lambda p: (jd.rpc_sync(last(), affine_of, args=(p, X)) ** 2).sum())(params)
            optimizer.step(ctx)
        return params.to_here()

    train()
    saved = optimizer.state()
    first = train()
    optimizer.restore(saved)
    again = train()
    assert list(again) == ["w", "key", "b", "name"]
    np.testing.assert_array_equal(jax.random.key_data(again["key"]), jax.random.key_data(first["key"]))
    assert again["key"].dtype == jax.random.key(0).dtype
    np.testing.assert_array_equal(again["w"], first["w"])
    np.testing.assert_array_equal(again["b"], first["b"])
    with pytest.raises(ValueError):
        optimizer.restore(changed(saved, 0, key=jax.random.key_data(jax.random.key(5))))


def make_plain(seed):
    return {"w": jnp.full((2, 3), seed + 0.5), "count": 3, "host": np.arange(4) + seed, "rate": 0.25}


@on_worker0
def test_what_was_saved_as_arrays_of_the_host_is_what_it_was(world):
    """Files give NumPy arrays back, also for Python numbers. Restored values have their old types, and are copies."""
    params = jd.remote(last(), make_plain, args=(1,))
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1, momentum=0.9), [params])
    saved = jax.tree.map(np.array, optimizer.state())
    jax.tree.map(lambda leaf: np.add(leaf, 1, out=leaf, casting="unsafe"), saved)
    optimizer.restore(saved)
    jax.tree.map(lambda leaf: leaf.fill(0), saved)
    found = params.to_here()
    assert isinstance(found["w"], jax.Array)
    assert isinstance(found["host"], np.ndarray)
    assert (found["count"], found["rate"], type(found["count"]), type(found["rate"])) == (4, 1.25, int, float)
    np.testing.assert_array_equal(found["w"], np.full((2, 3), 2.5))
    np.testing.assert_array_equal(found["host"], np.arange(4) + 2)
    assert_close(optimizer.state()["state"], jax.tree.map(jnp.ones_like, optimizer.state()["state"]))


@pytest.mark.parametrize("how", ["optimizer", "function"])
@on_worker0
def test_references_that_a_value_holds_stay_when_it_is_restored(world, how):
    held = jd.remote(0, make_array, args=((3,),))
    params = jd.remote(last(), holding, args=(jd.by_reference(held),))
    optimizer = jd.DistributedOptimizer(optax.adam(0.1), [params])
    function = jd.RemoteFunction(last(), params, jnp.add)
    saved = optimizer.state() if how == "optimizer" else function.variables()
    with jd.context() as ctx:
        jd.grad(lambda p: p.to_here()["w"].sum())(params)
        optimizer.step(ctx)
    (optimizer if how == "optimizer" else function).restore(saved)
    found = params.to_here()
    np.testing.assert_array_equal(found["w"], np.arange(3))
    assert found["held"].id == held.id
    np.testing.assert_array_equal(found["held"].to_here(), np.full(3, 0.5))


@on_worker0
def test_a_state_is_restored_on_other_owners(world):
    tx = optax.sgd(0.1, momentum=0.9)

    def optimizer_on(*owners):
        return jd.DistributedOptimizer(tx, [jd.remote(owner, make_array, args=((3,),)) for owner in owners])

    leaves, structure = jax.tree.flatten(optimizer_on(0, last(), 0).state())
    saved = jax.tree.unflatten(structure, [np.full_like(leaf, k) for k, leaf in enumerate(leaves)])
    other = optimizer_on(last(), 0, 0)
    other.restore(saved)
    assert_close(other.state(), saved)
