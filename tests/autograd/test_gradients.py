"""Gradients of remote calls, compared with the serial program: every way to call, in sequence and nested."""

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import assert_same_gradients, eventually, fast_layer, handed_on, layer, parameters, sync, vector
from helpers.worlds import on_worker0, rank

import jdistgrad as jd


@pytest.mark.parametrize(
    ("way", "function"),
    [(sync, layer), (eventually, fast_layer), (handed_on, fast_layer)],
)
@on_worker0
def test_every_way_to_call_every_worker(big_world, way, function):
    for to in range(jd.world_size()):

        def program(call, params, x, to=to):
            return call(to, function, params, x, scale=2.5)

        assert_same_gradients(program, parameters(3, 2, to), vector((4, 3), to), call=way)


@pytest.fixture
def nothing_compiled():
    """Let JAX run all code as it is written, on all workers, as somebody does who looks for an error."""
    jax.config.update("jax_disable_jit", True)
    yield
    jax.config.update("jax_disable_jit", False)


@on_worker0
def test_nothing_needs_to_be_compiled(big_world, nothing_compiled):
    assert_same_gradients(lambda call, params, x: call(1, fast_layer, params, x)["h"], parameters(3, 4), vector((2, 3)))


def nested(x):
    return jd.rpc_sync(rank(2), innermost, args=(jnp.sin(x), x[:2])) * x


def innermost(x, y):
    return x * jnp.sum(y**2)


def nested_serially(x):
    return innermost(jnp.sin(x), x[:2]) * x


@on_worker0
def test_a_call_that_makes_a_call(big_world):
    with jd.context():
        found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), nested, args=(x,)))(vector(3))
    assert_close(found, jax.jacrev(nested_serially)(vector(3)))


def through_remote(x):
    rref = jd.remote(rank(2), innermost, args=(x, x[1:]))
    return jd.rpc_sync(rank(0), innermost, args=(rref, x)) * rref.to_here()


def through_remote_serially(x):
    inner = innermost(x, x[1:])
    return innermost(inner, x) * inner


@on_worker0
def test_a_callee_that_makes_references_of_its_own(big_world):
    with jd.context():
        found = jax.jacrev(lambda x: jd.rpc_sync(rank(1), through_remote, args=(x,)))(vector(3))
    assert_close(found, jax.jacrev(through_remote_serially)(vector(3)))


def later(x):
    return jd.rpc_async(rank(2), innermost, args=(jnp.sin(x), x[:2]))


def of_its_value(x):
    return x * 2


@pytest.mark.parametrize("stage", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@on_worker0
def test_a_function_that_answers_with_a_future(world, stage):
    serially = lambda x: 2 * innermost(jnp.sin(x), x[:2])  # noqa: E731
    by_value = lambda x: 2 * jd.rpc_sync(rank(1), later, args=(x,))  # noqa: E731
    by_reference = lambda x: jd.rpc_sync(rank(2), of_its_value, args=(jd.remote(rank(1), later, args=(x,)),))  # noqa: E731
    x = vector(3)
    with jd.context():
        for program in (by_value, by_reference):
            assert_close(stage(program)(x), serially(x))
            assert_close(stage(jax.jacrev(program))(x), jax.jacrev(serially)(x))
        assert_close(stage(jax.vmap(by_value))(vector((4, 3))), jax.vmap(serially)(vector((4, 3))))
