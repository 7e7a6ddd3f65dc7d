"""``on``: functions as they run on other workers, called and given to JAX."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import last, on_worker0

import jdistgrad as jd

pytestmark = pytest.mark.world(1, 3)

COMPILED = []


def affine(x, *, scale=1.0, shift=0.0):
    return jnp.sin(x) * scale + shift


def rank_times(x):
    return jd.rank() * x


@on_worker0
def test_a_call_a_future_and_a_reference(world):
    last, x = jd.world_size() - 1, jnp.arange(3.0)
    there = jd.on(last, affine)
    np.testing.assert_allclose(there(x, scale=2.0), 2 * jnp.sin(x))
    np.testing.assert_allclose(there.start(x, shift=1.0).result(), jnp.sin(x) + 1)
    kept = jd.on(f"worker{last}", affine).keep(x)
    assert kept.owner.rank == last
    np.testing.assert_allclose(jd.on(jd.worker_info(last), jnp.add)(kept, 1), jnp.sin(x) + 1)  # a reference's value


@on_worker0
def test_several_workers_give_a_list(world):
    size = jd.world_size()
    ranks = list(range(size))[::-1]
    assert jd.on(ranks, rank_times)(2) == [2 * rank for rank in ranks]
    assert jd.on(None, rank_times).start(3).result() == [3 * rank for rank in range(size)]
    assert [one.to_here() for one in jd.on(tuple(ranks), rank_times).keep(4)] == [4 * rank for rank in ranks]


@on_worker0
def test_jax_takes_it_for_a_function(world):
    there, x = jd.on(jd.world_size() - 1, affine), jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(jax.jit(there)(x), jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(functools.partial(there, scale=3.0))(x), 3 * jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.lax.scan(lambda c, one: (there(c), there(one)), x[0], x)[1], jnp.sin(x), rtol=1e-6)
    with jd.context():
        everybody = jd.on(list(range(jd.world_size())), affine)
        gradient = jax.grad(lambda x: jnp.sum(there(x)) + sum(jnp.sum(y) for y in everybody(x)))(x)
    np.testing.assert_allclose(gradient, (1 + jd.world_size()) * jnp.cos(x), rtol=1e-6)


@on_worker0
def test_equal_ones_are_compiled_once(world):
    def traced(function, x):
        COMPILED.append(function)
        return function(x)

    compiled, before = jax.jit(traced, static_argnums=0), len(COMPILED)
    for _ in range(3):
        compiled(jd.on(0, affine), jnp.ones(2))
    assert len(COMPILED) == before + 1
    assert jd.on(0, affine) != jd.on(0, jnp.sin)


@on_worker0
def test_it_can_be_sent(world):
    assert pickle.loads(pickle.dumps(jd.on(0, rank_times))) == jd.on(0, rank_times)
    assert jd.on(jd.world_size() - 1, lambda function: function(5))(jd.on(0, rank_times)) == 0


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError):
        jd.on(1, jnp.ones(3))


@on_worker0
def test_a_value_is_put_and_its_parts_are_references(world):
    params = jd.put(last(), {"w": jnp.arange(6.0).reshape(2, 3), "layers": [jnp.ones(2), 5]})
    part = params["w"]
    assert (part.owner, part.shape, part.dtype) == (params.owner, (2, 3), jnp.float32)
    assert jd.on(last(), lambda whole, part: whole["w"] is part)(params, part)  # no copy
    np.testing.assert_array_equal(params["w"][1, :2].to_here(), [3, 4])
    assert params["layers"][1].to_here() == 5
    assert [one.to_here() for one in jd.put(range(jd.world_size()), 7)] == [7] * jd.world_size()
    with pytest.raises(AttributeError):
        _ = params.shape
    with pytest.raises(KeyError):
        params["v"].to_here()
    with pytest.raises(TypeError):
        iter(params)


def weighted(w, x):
    return jnp.sum(jnp.sin(w) @ x)


@pytest.mark.parametrize("stage", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@on_worker0
def test_parts_are_differentiable(world, stage):
    value, x = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}, jnp.arange(3.0)
    params = jd.put(last(), value)

    def loss(params):
        return jd.on(last(), weighted)(params["w"], x) * jnp.sum(params["b"].to_here() ** 2)

    with jd.context():
        found = stage(jd.grad(loss))(params).to_here()
    expected = jax.grad(lambda value: weighted(value["w"], x) * jnp.sum(value["b"] ** 2))(value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
