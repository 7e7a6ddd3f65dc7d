"""Optax's transformations of trees of references, compared with the same of arrays in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.transformations import NOT_HERE, PARAMS, REFUSED, TRANSFORMATIONS, gradients, marks_of, with_extra
from helpers.worlds import on_worker0

import jdistgrad as jd

OWNERS = {"a": 1, "c": 2, "s": 1}


def there(tree, world):
    return {name: jd.put(OWNERS[name] % world.size, one) if name in OWNERS else one for name, one in tree.items()}


def trained(tx, place, params, steps=4, **extra):
    """Return parameters after some steps, with the gradients of ``params``; and the state."""
    found = place(params)
    state = tx.init(found)
    for step in range(steps):
        updates, state = tx.update(place(gradients(params, step)), state, found, **extra)
        found = jd.tree_map(optax.apply_updates, found, updates)
    return jd.get(found), state


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [pytest.param(one, marks=marks_of(one)) for one in TRANSFORMATIONS])
@on_worker0
def test_each_of_optax_is_exact_or_refused(world, name):
    if world.size < 3:
        pytest.skip("the parameters are on two other workers: three ranks run this test")
    tx, extra = with_extra(name)
    try:
        expected, _ = trained(tx, lambda tree: tree, PARAMS, **extra)
    except Exception:
        assert name in NOT_HERE
        return
    assert name not in NOT_HERE
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"takes arrays of ranks \[1, 2\] together"):
            trained(jd.on_owners(tx), lambda tree: there(tree, world), PARAMS, **extra)
        return
    found, _ = trained(jd.on_owners(tx), lambda tree: there(tree, world), PARAMS, **extra)
    assert_close(found, expected, rtol=1e-3, atol=1e-4)


@on_worker0
def test_gradients_of_references(big_world):
    x, y = jnp.linspace(0, 1, 4), jnp.ones(3)

    def loss(params, of=lambda f, _: f):
        hidden = of(jnp.dot, params["a"])(params["a"], x)
        return jnp.sum((of(jnp.dot, params["c"])(params["c"], jnp.tanh(hidden)) - y) ** 2)

    values = {"a": jnp.ones((2, 4)), "c": jnp.ones((3, 2))}
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
    state, found = tx.init(values), values
    refs = {"a": jd.put(1, values["a"]), "c": jd.put(2, values["c"])}
    ours = jd.on_owners(tx)
    our_state = ours.init(refs)
    for _ in range(3):
        updates, state = tx.update(jax.grad(loss)(found), state, found)
        found = optax.apply_updates(found, updates)
        there = jd.grad(lambda p: loss(p, lambda f, ref: jd.on(ref.owner, f)))(refs)
        updates, our_state = ours.update(there, our_state, refs)
        refs = jd.tree_map(optax.apply_updates, refs, updates)
    assert_close(jd.get(refs), found, rtol=1e-4)
    assert {refs[name].owner.rank for name in refs} == {1, 2}


@on_worker0
def test_an_owner_is_called_once_and_once_more_for_a_norm(big_world):
    for tx, calls in ((optax.adam(0.1), 1), (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2)):
        ours, refs = jd.on_owners(tx), there(PARAMS, big_world)
        state, given = ours.init(refs), there(gradients(PARAMS, 0), big_world)
        ours.update(given, state, refs)
        with jd.timeline() as recorded:
            ours.update(given, state, refs)
        assert len([event for event in recorded.events if (event.kind, event.rank) == ("call", 0)]) == 2 * calls


@on_worker0
def test_the_state_is_optax_s_own(big_world):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    ours, refs = jd.on_owners(tx), there(PARAMS, big_world)
    state, serial = ours.init(refs), tx.init(PARAMS)
    assert_close(jd.get(state.inner), serial)
    assert isinstance(state.inner.inner_state[0].mu["a"], jd.RRef)
    assert state.inner.hyperparams["learning_rate"] == jnp.float32(0.1)
    changed = {**state.inner.hyperparams, "learning_rate": jnp.float32(0.5)}
    state = state._replace(inner=state.inner._replace(hyperparams=changed))
    serial = serial._replace(hyperparams={**serial.hyperparams, "learning_rate": jnp.float32(0.5)})
    given = gradients(PARAMS, 0)
    updates, state = ours.update(there(given, big_world), state, refs)
    expected, serial = tx.update(given, serial, PARAMS)
    assert_close(jd.get(updates), expected)
    state = state._replace(inner=jd.get(state.inner))  # as a checkpoint has it
    updates, _ = ours.update(there(given, big_world), state, refs)
    assert_close(jd.get(updates), tx.update(given, serial, PARAMS)[0])


@on_worker0
def test_masks_of_parts_of_values(big_world):
    mask = {"a": {"w": True, "b": False}, "c": {"w": False}, "s": True, "here": False}
    tx = optax.chain(optax.masked(optax.add_decayed_weights(0.1), mask), optax.sgd(0.1, momentum=0.9))
    expected, _ = trained(tx, lambda tree: tree, PARAMS)
    found, state = trained(jd.on_owners(tx), lambda tree: there(tree, big_world), PARAMS)
    assert_close(found, expected)
    assert_close(jd.get(state.inner)[1][0].trace["here"], state.inner[1][0].trace["here"])


def applied(params, x):
    return jnp.sum(jnp.tanh(x @ params["a"]) @ params["c"]["w"])


@on_worker0
def test_modules_are_optimized_as_their_references_are(big_world):
    """JAX compares the structures of trees; objects of users' classes equal only themselves."""
    x, value = jnp.ones(3), {"a": jnp.ones((3, 2)), "c": {"w": jnp.arange(2.0)}}
    tx = optax.adam(0.1)
    ours, module = jd.on_owners(tx), jd.RemoteFunction(2, lambda: value, applied)
    found, _ = ours.update(jd.grad(lambda m: m(x))(module), ours.init(module), module)
    expected, _ = tx.update(jax.grad(applied)(value, x), tx.init(value), value)
    assert_close(jd.get(found.parameters), expected)


@on_worker0
def test_what_is_no_float_array_stays_as_it_is(big_world):
    value = {"w": jnp.ones(3), "steps": jnp.int32(7), "name": "mixed"}
    ours, ref = jd.on_owners(optax.sgd(0.5)), jd.put(2, value)
    updates, _ = ours.update(jd.put(2, {"w": jnp.ones(3), "steps": None, "name": None}), ours.init(ref), ref)
    np.testing.assert_array_equal(updates.to_here()["w"], np.full(3, -0.5))


@on_worker0
def test_misuse_is_named(big_world):
    ours, refs = jd.on_owners(optax.adam(0.1)), there(PARAMS, big_world)
    state = ours.init(refs)
    with pytest.raises(TypeError):
        jd.on_owners(optax.adam)
    with pytest.raises(ValueError, match="was on another worker when init was called"):
        ours.update(refs, state, {**refs, "a": jd.put(2, PARAMS["a"])})
    with pytest.raises(ValueError):
        ours.update(refs, state, refs, value_fn=jnp.sum)
    with pytest.raises(TypeError):
        jax.jit(lambda x: ours.update(refs, state, refs))(1.0)
