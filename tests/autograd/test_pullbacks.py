"""Pullbacks on the callee: arguments are not copied, and each order has its own operands."""

import functools
import gc
import pickle
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.autograd.callee.functions import BatchedOf, PullbackOf, PushforwardOf, Typed, handled_by_jit
from jdistgrad.autograd.callee.pullbacks import _compiled_for, differentiate
from jdistgrad.autograd.values.holes import split
from jdistgrad.rpc.functions import ServedFunction
from jdistgrad.wire.polling import poll


def differentiated(function, *args):
    layout, operands = split((args, {}), lambda leaf: True)
    return differentiate(function, layout, operands, (tuple(range(len(operands))),), references=False), operands


def test_arguments_that_a_pullback_keeps_are_not_copied():
    @jax.jit
    def function(a, b):
        return a * b, jnp.exp(a)

    found, (a, b) = differentiated(function, jnp.arange(3.0), jnp.array([2.0, 3.0, 4.0]))
    kept = jax.tree.leaves(found.pullbacks)
    assert {id(a), id(b)} <= {id(one) for one in kept}
    expected = jax.vjp(function, a, b)[1]((jnp.ones(3), jnp.arange(3.0)))
    for mine, theirs in zip(found.linear(0, (0, 1), [jnp.ones(3), jnp.arange(3.0)]), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


@pytest.mark.parametrize("make", [np.ones, jnp.ones], ids=["numpy", "jax"])
def test_a_result_that_is_an_argument_twice_is_an_array_of_jax(make):
    found, _ = differentiated(jax.jit(lambda a, b: (a, a, b + 1)), make(3), make((2, 1)))
    assert all(isinstance(one, jax.Array) for one in found.result)
    assert [one.shape for one in found.result] == [(3,), (3,), (2, 1)]
    (first, second) = found.linear(0, (0, 2), [jnp.full(3, 5.0), jnp.full((2, 1), 7.0)])
    np.testing.assert_array_equal(first, np.full(3, 5.0))
    np.testing.assert_array_equal(second, np.full((2, 1), 7.0))


@pytest.mark.parametrize("static", [(), (1,)], ids=["traced", "static"])
def test_a_jitted_function_is_compiled_once_for_all_integers(static):
    """The number of a step, say; unless jax.jit was told that the argument is a part of the program."""
    function, forms = jax.jit(lambda a, k, flag: (a * k, k, flag), static_argnums=static), set()
    for k in (1, 3, 5, 3):
        layout, operands = split(((jnp.arange(1.0, 4.0), k, True), {}), lambda leaf: isinstance(leaf, jax.Array))
        found = differentiate(function, layout, operands, ((0,),), references=False)
        np.testing.assert_array_equal(found.result[0], k * np.arange(1.0, 4.0))
        assert (found.result[1], found.result[1].dtype, found.result[2].dtype) == (k, "int32", "bool")
        np.testing.assert_array_equal(found.linear(0, (0,), [jnp.ones(3)])[0], np.full(3, k))
        forms.add(_compiled_for(function, layout, ((0,),)))
    assert len(forms) == (3 if static else 1)


def test_what_jit_does_with_the_arguments_of_derived_functions():
    function = jax.jit(lambda a, k, axis: jnp.sum(a * k, axis), static_argnames="axis")
    inner, own = ((1.0, 3), {"axis": 1}), ["traced", "traced", "static"]
    assert handled_by_jit(function, *inner) == own
    assert handled_by_jit(BatchedOf(function, ((0, 0),), 4), *inner) == own
    assert handled_by_jit(PushforwardOf(Typed(function, ()), ((0,),)), (7, *inner, 1.0), {}) == ["other", *own, "other"]
    outer = PullbackOf(PullbackOf(function, ((0,),), (0,)), ((0,),), (0,))
    assert handled_by_jit(outer, (7, 8, (7, 8, *inner, 1.0), {}, 1.0), {}) == [*["other"] * 4, *own, *["other"] * 2]
    assert handled_by_jit(Scale(), (1.0, 2), {}) == ["other", "other"]


class Scaled:
    """A function made of another, which has that one's name and module."""

    def __init__(self, function, scale):
        functools.update_wrapper(self, function)
        self.function, self.scale = function, scale

    def __call__(self, a):
        return self.scale * self.function(a)


def written(scaled):
    @functools.wraps(jnp.sin)
    def function(a):
        return scaled(a)

    return function


@pytest.mark.parametrize("decorate", [lambda scaled: scaled, written, lambda scaled: jax.vmap(written(scaled))])
def test_what_users_make_of_a_function_of_jax_runs_as_written(decorate):
    scaled = Scaled(jnp.sin, 1.0)
    function = decorate(scaled)
    for scaled.scale in (1.0, 3.0):
        found, (a,) = differentiated(function, jnp.arange(3.0))
        np.testing.assert_allclose(found.result, scaled.scale * jnp.sin(a), rtol=1e-6)
        np.testing.assert_allclose(found.linear(0, (0,), [jnp.ones(3)])[0], scaled.scale * jnp.cos(a), rtol=1e-6)


@pytest.mark.parametrize("function", [jnp.sin, jnp.cumulative_sum, jax.nn.relu, jax.lax.exp, jax.vmap(jnp.sin)])
def test_functions_of_jax_are_compiled(function):
    assert differentiated(function, jnp.arange(3.0))[0].compiled


def test_each_order_has_a_pullback_of_its_own_operands():
    # One run gives both pullbacks: the outer one differentiates the forward pass of the inner one.

    @jax.custom_vjp
    def ruled(a):
        return a * 2

    ruled.defvjp(lambda a: (a**3, a), lambda a, g: (-5 * g * a,))
    runs = []

    def function(a, b):
        runs.append(a)
        return ruled(a) * b

    layout, (a, b) = split(((jnp.arange(1.0, 4.0), jnp.array([2.0, 3.0, 4.0])), {}), lambda leaf: True)
    found = differentiate(function, layout, [a, b], ((0,), (0, 1)), references=False)
    (inner,) = found.linear(0, (0,), [b])
    np.testing.assert_allclose(inner, -5 * a * b * b, rtol=1e-6)
    outer = found.linear(1, (0,), [b])
    np.testing.assert_allclose(outer, [3 * a**2 * b * b, a**3 * b], rtol=1e-6)
    np.testing.assert_allclose(found.result, a**3 * b, rtol=1e-6)
    assert len(runs) == 1


class Scale(ServedFunction):
    pure = True

    def __call__(self, a, k):
        return a * k


def jitted(factor):
    large = jnp.full(3, factor)
    return jax.jit(lambda a: a * large * a), weakref.ref(large)


def test_the_pullbacks_compiled_for_a_jitted_function_go_with_it():
    """A notebook in which a cell runs again and again would keep those of each run."""
    programs = jax.local_devices()[0].client.live_executables

    def gradient_and_tangent():
        function, _ = jitted(5.0)
        found, (x,) = differentiated(function, jnp.arange(3.0))
        found.linear(0, (0,), [jnp.ones(3)])
        found.linear(0, None, [x])

    gradient_and_tangent()
    gc.collect()
    kept = len(programs())
    gradient_and_tangent()
    assert poll(lambda: [gc.collect()] and len(programs()) <= kept, 10)


def test_a_function_that_wraps_a_jitted_one_has_programs_of_its_own():
    """``functools.wraps``, which jax.jit uses too, copies what a function holds."""
    function, _ = jitted(5.0)
    differentiated(function, jnp.arange(3.0))
    wrapped = functools.wraps(function)(lambda a: function(a) + a)
    other = jax.jit(wrapped)
    assert pickle.loads(cloudpickle.dumps(vars(wrapped)["_jdistgrad_programs"])) is None
    found, (a,) = differentiated(other, jnp.arange(3.0))
    assert found.compiled
    np.testing.assert_allclose(found.result, 5 * a**2 + a)
    np.testing.assert_allclose(found.linear(0, (0,), [jnp.ones(3)])[0], 10 * a + 1)
