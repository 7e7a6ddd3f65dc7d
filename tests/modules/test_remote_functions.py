"""Functions whose parameters live on another worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.data import assert_close
from helpers.models import Normalized, X, compiled_line, init_line, line, squares
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.modules.function import RemoteFunction, RemoteModule


@pytest.mark.parametrize("apply", [line, compiled_line])
@on_worker0
def test_a_function_beside_its_parameters(big_world, apply):
    function = RemoteFunction(last(), init_line, apply, args=(2.0,))
    local = init_line(2.0)
    assert function.owner.rank == last()
    np.testing.assert_allclose(function(X, scale=3.0), line(local, X, scale=3.0), rtol=1e-6)
    np.testing.assert_allclose(function.rpc_async(X).result(), line(local, X), rtol=1e-6)
    kept = function.remote(X)
    assert kept.owner == function.owner
    np.testing.assert_allclose(kept.to_here(), line(local, X), rtol=1e-6)


@pytest.mark.parametrize(("apply", "staged"), [(line, False), (compiled_line, True)])
@on_worker0
def test_gradients_of_a_functions_parameters_stay_with_them(big_world, apply, staged):
    function = RemoteFunction(last(), init_line, apply, args=(2.0,))
    step = jd.value_and_grad(squares, argnums=(0, 1))
    step = jd.jit(step) if staged else step
    with jd.context():
        loss, (by_function, by_x) = step(function, X)
        assert by_function.parameters.owner == function.owner
        found = by_function.parameters.to_here()
    expected = jax.value_and_grad(lambda p, x: jnp.sum(line(p, x) ** 2), (0, 1))(init_line(2.0), X)
    assert_close((loss, (found, by_x)), expected)


def train_once(function, x):
    optimizer = jd.DistributedOptimizer(optax.sgd(0.1), [function.parameters])
    with jd.context() as ctx:
        jd.backward(ctx, squares, function, x)
        optimizer.step(ctx)


@on_worker0
def test_a_function_passed_by_reference_is_trained_where_it_lives(world):
    expected = init_line(2.0)
    function = RemoteFunction(last(), init_line, compiled_line, args=(2.0,))
    for trainer in range(jd.world_size()):
        jd.rpc_sync(trainer, train_once, args=(jd.by_reference(function), X))
        gradient = jax.grad(lambda p: squares(functools.partial(line, p), X))(expected)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradient)
    assert_close(function.parameters.to_here(), expected)


@on_worker0
def test_every_way_of_calling_has_the_derivative(big_world):
    def loss(function, x):
        return jnp.sum(function.rpc_async(x).result() * function.remote(x).to_here() * function(x))

    function = RemoteFunction(last(), init_line, compiled_line, args=(2.0,))
    with jd.context():
        found = jd.grad(loss)(function, X).parameters.to_here()
    assert_close(found, jax.grad(lambda p: jnp.sum(line(p, X) ** 3))(init_line(2.0)))


@on_worker0
def test_parameters_that_exist_and_others_in_their_place(big_world):
    mine = jd.RRef(init_line(5.0))
    function = RemoteFunction(0, mine, line)
    assert function.parameters is mine
    other = function.with_parameters(jd.remote(last(), init_line, args=(7.0,)))
    np.testing.assert_allclose(other(X) - function(X), 2 * X, rtol=1e-5)
    assert other.owner.rank == last()


def call_it(function, x):
    return function(x), isinstance(function.parameters, dict)


@on_worker0
def test_as_an_argument_it_arrives_with_its_parameters(big_world):
    for function in (
        RemoteFunction(last(), init_line, line, args=(2.0,)),
        RemoteModule(last(), Normalized(), (X,)),
    ):
        there, at_home = jd.rpc_sync(last(), call_it, args=(function, X))
        np.testing.assert_allclose(there, function(X), rtol=1e-6)
        assert at_home


def init_number():
    return {"scale": jnp.asarray(2.0)}


def scaled(params, x):
    return x * params["scale"]


@pytest.mark.parametrize("how", [lambda variables: variables, lambda variables: jax.tree.map(np.asarray, variables)])
@on_worker0
def test_restored_numbers_stay_weakly_typed(world, how):
    """A strongly typed one would make the results of other dtypes than before."""
    function, x = RemoteFunction(last(), init_number, scaled), jnp.ones(3, jnp.bfloat16)
    function.restore(how(function.variables()))
    assert function(x).dtype == jnp.bfloat16
