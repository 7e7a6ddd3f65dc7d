"""Bundling, without a transport: the operations of a step that share a message."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.autograd.callee.bundle import StopOutput
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.operations.messages import BundleCall
from jdistgrad.autograd.staged.plan import cut
from jdistgrad.autograd.values.holes import Hole, Layout, Results, Uniform
from jdistgrad.autograd.values.primitive import wire_p

X = np.ones(3, np.float32)


def call(to, function, *operands, extra=(), **settings):
    results = Results()
    shape = jnp.broadcast_shapes(*(np.shape(one) for one in operands))
    results.learn((Layout(Hole(), (0,)), [jax.ShapeDtypeStruct(shape, np.float32)]))
    arguments = Layout(((*(Hole() for _ in operands), *extra), {}), tuple(range(len(operands))))
    return wire_p.bind(*operands, operation=Call(to, function, arguments, results, **settings))[0]


def bundles(fun, *args):
    """Return the names of the functions that each message of the step requests."""
    plan = cut(jax.make_jaxpr(fun)(*args))
    return [[operation.function.__name__ for operation in one.operations] for one in plan.operations]


def members(fun, *args):
    (bundle,) = cut(jax.make_jaxpr(fun)(*args)).operations
    return bundle


def test_what_follows_on_one_worker_goes_together():
    def step(x):
        return call(1, jnp.tanh, call(1, jnp.cos, call(1, jnp.sin, x)))

    assert bundles(step, X) == [["sin", "cos", "tanh"]]
    bundle = members(step, X)
    assert [sources for _, sources in bundle.members] == [(0,), (StopOutput(0, 0),), (StopOutput(1, 0),)]
    assert bundle.wanted == (StopOutput(2, 0),)  # the others stay where they are made


def test_what_was_known_at_the_start_can_be_used_on_the_way():
    def step(x, y):
        return call(1, jnp.add, call(1, jnp.sin, x), y)

    assert [sources for _, sources in members(step, X, X).members] == [(0,), (StopOutput(0, 0), 1)]


def test_a_computation_in_between_is_made_here():
    assert bundles(lambda x: call(1, jnp.cos, call(1, jnp.sin, x) + 1), X) == [["sin"], ["cos"]]


def test_an_answer_from_elsewhere_is_not_waited_for():
    # The call of sin can be sent at once, but add needs the answer of another worker.

    def step(x):
        elsewhere = call(2, jnp.cos, x)
        return call(1, jnp.add, call(1, jnp.sin, x), elsewhere)

    assert sorted(bundles(step, X)) == [["add"], ["cos"], ["sin"]]


def test_who_waits_for_an_early_member_gets_it_early():
    def step(x):
        first = call(1, jnp.sin, x)
        return call(1, jnp.tanh, call(1, jnp.cos, first)) + call(2, jnp.exp, first)

    assert sorted(bundles(step, X)) == [["cos", "tanh"], ["exp"], ["sin"]]


def test_independent_calls_do_not_queue_behind_each_other():
    def step(x):
        first = call(1, jnp.sin, x)
        return call(1, jnp.cos, first) + call(1, jnp.tanh, first)

    assert sorted(bundles(step, X)) == [["cos"], ["sin"], ["tanh"]]


def test_a_computation_that_takes_long_does_not_wait_for_the_row():
    def step(x, matrix):
        first = call(1, jnp.sin, x)
        return matrix @ first + call(1, jnp.cos, first)

    assert bundles(step, X, np.ones((3, 3), np.float32)) == [["sin"], ["cos"]]
    assert bundles(lambda x: (y := call(1, jnp.sin, x)).sum() + call(1, jnp.cos, y), X) == [["sin", "cos"]]


def as_written(x):
    return x


@pytest.mark.parametrize("why", ["as written", "a time of its own", "an object among the arguments"])
def test_who_may_take_any_time_goes_alone(why):
    function = as_written if why == "as written" else jnp.cos

    def step(x):
        settings = {"timeout": 3.0} if why == "a time of its own" else {}
        extra = (object(),) if why == "an object among the arguments" else ()
        return call(1, jnp.tanh, call(1, function, call(1, jnp.sin, x), extra=extra, **settings))

    plan = cut(jax.make_jaxpr(step)(X))
    assert [type(one) for one in plan.operations] == [BundleCall, Call, BundleCall]


@pytest.mark.parametrize("length", [3, 1 << 20], ids=["small", "large"])
def test_one_number_everywhere_is_made_where_it_is_used(length):
    def step(x):
        return call(1, jnp.multiply, call(1, jnp.sin, x), jnp.full(length, 2.5))

    bundle = members(step, jax.ShapeDtypeStruct((length,), np.float32))
    *_, source = bundle.members[1][1]
    assert isinstance(source, Uniform)
    assert (source.shape, source.value) == ((length,), 2.5)


def test_all_that_is_made_stays_in_order():
    # A local computation that uses an early answer must come after the whole bundle.

    def step(x):
        first = call(1, jnp.sin, x)
        beside = first * 2
        return beside + call(1, jnp.cos, first)

    plan = cut(jax.make_jaxpr(step)(X))
    known = set(plan.inputs)
    for unit in plan.units:
        assert {atom for atom in unit.inputs if isinstance(atom, int)} <= known
        known.update(unit.outputs)


def test_a_row_does_not_wait_until_an_array_is_no_longer_weakly_typed():
    def step(x):
        return call(1, jnp.sin, jax.lax.convert_element_type(x, jnp.float32))

    plan = cut(jax.make_jaxpr(step)(jnp.full(3, 2.0)))
    assert next(unit.inputs for unit in plan.units if unit.operation) == plan.inputs
    scalar = cut(jax.make_jaxpr(step)(jnp.asarray(2.0)))  # the weak type of a scalar decides the dtype of a product
    assert next(unit.inputs for unit in scalar.units if unit.operation) != scalar.inputs
