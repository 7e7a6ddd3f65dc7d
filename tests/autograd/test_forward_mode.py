"""Derivatives of every order across calls: forward mode (jvp, jacfwd, linearize), by itself and with reverse mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close, random_like
from helpers.programs import (
    X,
    affine,
    fast_layer,
    fast_product,
    fetched,
    handed_on,
    layer,
    make_params,
    parameters,
    product,
    rank,
    serial,
    square,
    still_differentiates,
    sync,
    vector,
)
from helpers.worlds import last, on_worker0

import jdistgrad as jd


def chain(call, x):
    return call(2, product, call(1, fast_product, x, x * x), x) ** 2


def diamond(call, x):
    shared = call(1, product, x, x)
    return call(2, product, shared, x) * call(0, fast_product, shared, jnp.exp(shared))


def scanned(call, x):
    step = lambda carry, one: (call(1, fast_product, carry, one), carry.sum())  # noqa: E731
    last, sums = jax.lax.scan(step, x, jnp.stack([x, x + 1, 2 * x]))
    return last * sums


def branching(call, x):
    yes, no = (lambda x: call(1, fast_product, x, x)), (lambda x: call(2, product, x, 2 * x))
    return jax.lax.cond(x[0] > 0, yes, no, x) * jax.lax.cond(x[0] < 0, yes, no, x)


def mapped(call, x):
    """Map calls over a batch; one argument of each call is the same for all elements."""
    rows = jnp.stack([x, x + 1, 2 * x, jnp.sin(x)])
    return jax.vmap(lambda row: call(1, fast_product, row, x) + call(2, product, x, row))(rows).sum(0)


def checkpointed(call, x):
    return jax.checkpoint(lambda x: call(1, product, x, call(2, fast_product, x, x)))(x)


def by_reverse(call, x):
    """Use a derivative inside the program."""
    return jax.grad(lambda x: jnp.sum(chain(call, x)))(x) * x


def linear_in_a_batch(call, x):
    """Map a linear function, and its transpose, over points; both are differentiated after JAX has taken them apart."""

    def moved(row):
        push = jax.linearize(lambda row: call(1, fast_product, row, x), row)[1]
        return jax.vmap(push)(jnp.stack([x, 2 * x])).sum(0) * jax.linear_transpose(push, x)(row)[0]

    return jax.vmap(moved)(jnp.stack([x, x + 1, jnp.sin(x)])).sum(0)


def implicit(call, x):
    """Return what solves an equation with a call in it; its derivative is that of the implicit function theorem."""

    def solve(remainder, start):
        return jax.lax.fori_loop(0, 20, lambda _, y: y - remainder(y), start)

    def solve_tangent(linear, y):
        return jnp.linalg.solve(jax.jacobian(linear)(y), y)

    return jax.lax.custom_root(lambda y: y - x - call(1, fast_product, y, x) / 4, x, solve, solve_tangent)


def jacfwd(f):
    return jax.jacfwd(f)


def forward_twice(f):
    return jax.jacfwd(jax.jacfwd(f))


def forward_over_reverse(f):
    return jax.jacfwd(jax.jacrev(f))


def reverse_over_forward(f):
    return jax.jacrev(jax.jacfwd(f))


def along(f):
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))


def along_twice(f):
    return along(along(f))


def gradient_along(f):
    return jax.grad(lambda x: jnp.sum(along(f)(x)[1] ** 2))


def second(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x) * jnp.cos(x)))


def third(f):
    return jax.grad(lambda x: jnp.sum(second(f)(x) * x))


OTHERS = [diamond, scanned, branching, checkpointed, by_reverse, linear_in_a_batch]
DERIVATIVES = [along, jacfwd, along_twice, forward_twice, forward_over_reverse, reverse_over_forward, gradient_along]


def assert_same(program, derivative, stage=lambda f: f, call=sync):
    x = vector(3)
    with jd.context():
        found = stage(derivative(functools.partial(program, call)))(x)
    expected = jax.jit(derivative(functools.partial(program, serial)))(x)
    assert_close(found, expected, rtol=1e-3, atol=1e-3 * (1 + float(jnp.max(jnp.abs(jax.tree.leaves(expected)[-1])))))


@pytest.mark.parametrize(
    ("program", "derivative"),
    [
        *((chain, derivative) for derivative in DERIVATIVES),
        *((mapped, derivative) for derivative in (along_twice, reverse_over_forward, gradient_along)),
        *((program, gradient_along) for program in OTHERS),
        *((program, second) for program in (diamond, scanned, branching, checkpointed)),
        (chain, third),
        *((program, reverse_over_forward) for program in (scanned, branching)),
    ],
)
@on_worker0
def test_a_derivative_is_the_serial_one(big_world, program, derivative):
    assert_same(program, derivative)


@pytest.mark.parametrize(("program", "derivative", "call"), [(chain, third, handed_on), (diamond, second, fetched)])
@on_worker0
def test_a_derivative_through_references_is_the_serial_one(big_world, program, derivative, call):
    assert_same(program, derivative, call=call)


@pytest.mark.parametrize("stage", [jax.jit, jd.jit], ids=["jax.jit", "jd.jit"])
@pytest.mark.parametrize(
    ("program", "derivative"), [(diamond, jacfwd), (diamond, reverse_over_forward), (scanned, along)]
)
@on_worker0
def test_a_compiled_derivative_is_the_serial_one(big_world, program, derivative, stage):
    assert_same(program, derivative, stage)


@pytest.mark.parametrize("stage", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@pytest.mark.parametrize("derivative", [jax.jacrev, gradient_along])
@on_worker0
def test_an_implicit_function(big_world, derivative, stage):
    assert_same(implicit, derivative, stage)


def linearized(f, x):
    return jax.linearize(f, x)[1]


def solved(call, x, linear=linearized):
    """Return what solves a linear system of which a part is a call."""
    matvec = linear(lambda y: y + call(1, affine, {"w": jnp.outer(x, x) / 9, "b": 0 * x}, y), x)
    solve = lambda matvec, b: jax.lax.fori_loop(0, 12, lambda _, y: y + b - matvec(y), b)  # noqa: E731
    return jax.lax.custom_linear_solve(matvec, x, solve, solve)


def ruled(call, x, linear=linearized):
    """Return the result of a function whose rule makes a call with tangents."""
    function = jax.custom_jvp(lambda x: call(1, square, x))
    function.defjvp(lambda xs, ts: (function(*xs), linear(lambda t: call(2, product, xs[0], t), xs[0])(*ts)))
    return function(x) * x


@pytest.mark.parametrize(
    ("program", "derivative"), [(solved, jax.jacrev), (solved, gradient_along), (ruled, gradient_along)]
)
@on_worker0
def test_what_jax_transposes_is_linearized_first(big_world, program, derivative):
    refused = pytest.raises(jd.DifferentiationError, match=r"cannot be transposed.* jax\.linearize\(f, x\)\[1\]")
    with jd.context(), refused:
        jax.jacrev(functools.partial(program, sync, linear=lambda f, x: f))(vector(3))
    assert_same(program, derivative)  # as the error says


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (2.0,))[1]),
        lambda f: lambda x: jax.linearize(jax.grad(f), x)[1](2.0),
    ],
    ids=["reverse_over_forward", "linearize"],
)
@on_worker0
def test_a_derivative_at_a_python_float(big_world, derivative):
    def program(call, number):
        return call(1, fast_product, call(2, product, number, 3.0), number) * jnp.sin(number)

    with jd.context():
        found = derivative(functools.partial(program, sync))(0.5)
    assert_close(found, derivative(functools.partial(program, serial))(0.5), rtol=1e-4)


@pytest.mark.parametrize("function", [layer, fast_layer])
@on_worker0
def test_one_linear_function_for_several_tangents(big_world, function):
    params, x = parameters(3, 2), vector(3)
    with jd.context():
        value, push = jax.linearize(lambda params, x: sync(1, function, params, x), params, x)
        found = [push(*random_like((params, x), seed)) for seed in range(3)]
    expected, local = jax.linearize(function, params, x)
    assert_close((value, found), (expected, [local(*random_like((params, x), seed)) for seed in range(3)]))


def along_the_step_before(call, linearize, x):
    """Carry a linear function through a loop, as solvers of least squares do. The first step has zeros in its place."""
    f = lambda x: call(1, product, x, call(2, fast_product, x, x))  # noqa: E731
    shapes, structure = jax.tree.flatten(jax.eval_shape(lambda x: linearize(f, x)[1], x))

    def step(carry, known):
        x, before = carry
        pushed = jnp.where(known, jnp.stack(jax.tree.leaves(jax.tree.unflatten(structure, before)(x))), 0.0)
        value, now = linearize(f, x)
        return (jnp.tanh(value), jax.tree.leaves(now)), pushed

    filling = [jnp.zeros(one.shape, one.dtype) for one in shapes]
    return jax.lax.scan(step, (x, filling), jnp.array([False, True, True]))[1]


@pytest.mark.parametrize("stage", [jax.jit, jd.jit], ids=["jax.jit", "jd.jit"])
@pytest.mark.parametrize("linearize", [jax.linearize, jax.vjp], ids=["pushes", "pulls"])
@on_worker0
def test_a_loop_begins_with_zeros_in_place_of_a_linear_function(big_world, linearize, stage):
    x = vector(3) / 4
    expected = along_the_step_before(serial, linearize, x)
    for _ in range(2):  # zeros were taken for the first call of the first context
        with jd.context():
            assert_close(stage(functools.partial(along_the_step_before, sync, linearize))(x), expected)


def mixed(x, key, count):
    """Return results of several types; some of them have no derivative."""
    noise = jax.random.normal(key, x.shape)
    return {"y": x * noise, "n": count + 1, "z": (x + 1j * x) ** 2, "h": x.astype(jnp.bfloat16), "text": "same"}


@on_worker0
def test_results_without_derivative_beside_others(big_world):
    x, key = vector(3), jax.random.key(3)

    def program(call, x):
        found = call(1, mixed, x, key, jnp.arange(2))
        return found["y"] * found["z"].real + found["h"].astype(jnp.float32), found["n"]

    with jd.context():
        found = along(functools.partial(program, sync))(x)
    assert_close(found, along(functools.partial(program, serial))(x), rtol=1e-5)


@jax.custom_jvp
def own_rule(x):
    return jnp.sin(x)


@own_rule.defjvp
def _rule(primals, tangents):
    return own_rule(*primals), 3.0 * tangents[0]


def own_pullback(x):
    return _pulled(x)


@jax.custom_vjp
def _pulled(x):
    return jnp.sin(x)


_pulled.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (5.0 * x * cotangent,))


@on_worker0
def test_rules_of_the_called_function_hold(big_world):
    with jd.context():
        _, found = jax.jvp(lambda x: sync(1, own_rule, x), (X,), (2 * X,))
        assert_close(found, 6.0 * X)
        _, found = jax.jvp(lambda x: sync(1, own_pullback, x), (X,), (2 * X,))
        assert_close(found, 10.0 * X * X)  # JAX itself refuses this one; it follows from the pullback


@jax.custom_vjp
def squashed(x):
    return x


squashed.defvjp(lambda x: (x, ()), lambda _, cotangent: (cotangent / (1 + cotangent**2),))


def with_squashed_gradient(x):
    return 2 * squashed(x)


@on_worker0
def test_a_rule_that_is_not_linear_has_no_transpose(big_world):
    with jd.context():
        for function in (squashed, with_squashed_gradient):
            with pytest.raises(jd.DifferentiationError):
                jax.jvp(lambda x, function=function: sync(1, function, x), (X,), (X,))
        assert_close(jax.grad(lambda x: jnp.sum(sync(1, squashed, x)))(X), jnp.full(3, 0.5))


def calls_on(x):
    return jd.rpc_sync(rank(2), product, args=(x, jd.rpc_sync(rank(0), fast_product, args=(x, x))))


@pytest.mark.parametrize("derivative", [along, reverse_over_forward])
@on_worker0
def test_a_function_that_calls_others(big_world, derivative):
    with jd.context():
        found = derivative(lambda x: sync(1, calls_on, x) ** 2)(vector(3))
    expected = derivative(lambda x: product(x, fast_product(x, x)) ** 2)(vector(3))
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@on_worker0
def test_references_that_are_not_differentiated(big_world):
    params, x = jd.remote(last(), make_params, args=(1,)), vector(3)
    with jd.context():
        found = jax.jacfwd(lambda x: jd.rpc_sync(1, affine, args=(params, x)) ** 2)(x)
    assert_close(found, jax.jacfwd(lambda x: affine(params.to_here(), x) ** 2)(x))


@on_worker0
def test_tangents_do_not_pass_through_references(big_world):
    def made_there(x):
        return jd.rpc_sync(1, square, args=(jd.remote(2, square, args=(x,)),))

    def fetched_again(x):
        return jd.remote(2, square, args=(x,)).to_here()

    for program, local in ((made_there, lambda x: square(square(x))), (fetched_again, square)):
        with jd.context():
            with pytest.raises(jd.DifferentiationError, match=r"no forward-mode derivative.*jax\.jacrev\(jax\.jacrev"):
                jax.jvp(program, (X,), (X,))
            still_differentiates()
            assert_close(jax.jacrev(program)(X), jax.jacrev(local)(X))


@on_worker0
def test_a_push_after_the_context_is_refused(big_world):
    with jd.context():
        _, push = jax.linearize(lambda x: sync(1, square, x), X)
        np.testing.assert_allclose(push(X), 2 * X * X, rtol=1e-6)
    with pytest.raises(jd.ContextError):
        push(X)
