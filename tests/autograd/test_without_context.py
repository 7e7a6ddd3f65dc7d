"""Derivatives outside any context: JAX's own transformations of calls, in any order, and what they leave behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.data import assert_close
from helpers.programs import as_written, fast_product, serial, sync, vector
from helpers.worlds import holders, on_worker0, rank, wait_until_nobody_takes_part

import jdistgrad as jd

X, M = vector(3) / 2, vector(3, seed=2)


def rows(x):
    return jnp.stack([x, x / 2, x[::-1]])


def pulled_twice(f):
    def both(x):
        _, pullback = jax.vjp(f, x)
        return pullback(1.0)[0] + jnp.cos(pullback(2.0)[0])

    return both


def never_pulled(f):
    return lambda x: jax.vjp(f, x)[0]


def moved_twice(f):
    def both(x):
        value, along = jax.linearize(f, x)
        return value + along(M) * along(M * 2)

    return both


def repeated(f):
    return lambda x: jax.lax.scan(lambda total, one: (total * 0.5 + f(one) * f(x), f(x)), 0.0, rows(x))[0]


def chosen(f):
    return lambda x: jax.lax.cond(M[0] > 0, f, lambda x: jnp.sum(f(x) * x), x)


# Functions of a vector, from a scalar function of a vector.
FORMS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jd.grad": jd.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of jd.grad": lambda f: jax.jit(jd.grad(f)),
    "jd.jit of grad": lambda f: jd.jit(jax.grad(f)),
    "vmap of jd.grad": lambda f: lambda x: jax.vmap(jd.grad(f))(rows(x)),
    "hessian": jax.hessian,
    "jacfwd": jax.jacfwd,
    "linearize": moved_twice,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (M,)),
    "vjp": pulled_twice,
}

# Scalar functions of a vector, from such functions.
STEPS = {
    "jit": jax.jit,
    "grad": lambda f: lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x)),
    "jvp": lambda f: lambda x: jnp.prod(jnp.stack(jax.jvp(f, (x,), (M,)))),
    "linearize": moved_twice,
    "vjp": lambda f: lambda x: jnp.sum(pulled_twice(f)(x)),
    "no pull": never_pulled,
    "jacfwd": lambda f: lambda x: jnp.sum(jnp.sin(jax.jacfwd(f)(x))),
    "vmap": lambda f: lambda x: jnp.sum(jax.vmap(f)(rows(x)) ** 2),
    "scan": repeated,
    "cond": chosen,
    "checkpoint": jax.checkpoint,
}


def chain(call):
    return lambda x: jnp.sum(jnp.tanh(call(2, as_written, call(1, fast_product, x, x * x), x)))


def composition(seed):
    """Draw up to three steps, and a form around them."""
    draw = np.random.default_rng(seed)
    return [*draw.choice(list(STEPS), draw.integers(1, 4)), draw.choice(list(FORMS))]


def composed(names, f):
    *steps, form = names
    for one in steps:
        f = STEPS[one](f)
    return FORMS[form](f)


def check(names):
    found = composed(names, chain(sync))(X)
    assert_close(found, composed(names, chain(serial))(X), rtol=1e-4, atol=1e-4)
    del found
    wait_until_nobody_takes_part()


@pytest.mark.parametrize("form", FORMS)
@on_worker0
def test_every_form(big_world, form):
    check([form])


@pytest.mark.parametrize("seed", [*range(16), 1020, 1149, 1168])  # JAX keeps what the last one evaluates
@on_worker0
def test_random_compositions(big_world, seed):
    check(composition(seed))


@on_worker0
def test_a_recording_lives_as_long_as_the_pullback(big_world):
    _, pullback = jax.vjp(chain(sync), X)
    assert holders() == {0, 1, 2}
    expected = jax.grad(chain(serial))(X)
    assert_close(pullback(1.0)[0], expected)
    assert_close(pullback(2.0)[0], expected * 2)
    del pullback
    wait_until_nobody_takes_part()


@pytest.mark.parametrize("keep", [jax.jit, jax.checkpoint, jax.linearize, lambda f: f])
@on_worker0
def test_functions_that_live_on_keep_nothing(big_world, keep):
    function = keep(chain(sync)) if keep is not jax.linearize else lambda x: keep(chain(sync), x)[0]
    for _ in range(2):
        assert_close(jax.grad(function)(X), jax.grad(chain(serial))(X))
    wait_until_nobody_takes_part()
    assert function


runs = []


def counting(x):
    runs.append(jnp.shape(x))
    return jnp.sin(x)


def runs_so_far():
    return len(runs)


@pytest.mark.parametrize("form", ["grad", "vmap of jd.grad", "jacfwd", "linearize", "jvp", "vjp"])
@on_worker0
def test_a_first_derivative_runs_the_function_once(big_world, form):
    before = jd.rpc_sync(rank(1), runs_so_far)
    FORMS[form](lambda x: jnp.sum(sync(1, counting, x)))(X)
    assert jd.rpc_sync(rank(1), runs_so_far) - before == 1


@on_worker0
def test_a_function_compiled_in_a_context_and_called_outside(big_world):
    differentiate = jax.jit(jax.grad(chain(sync)))
    expected = jax.grad(chain(serial))(X)
    with jd.context():
        assert_close(differentiate(X), expected)
    assert_close(differentiate(X), expected)
    with jd.context():
        _, pullback = jax.vjp(jax.jit(chain(sync)), X)
        assert_close(pullback(1.0)[0], expected)
    _, pullback = jax.vjp(jax.jit(chain(sync)), X)
    with jd.context():
        assert_close(pullback(1.0)[0], expected)
    wait_until_nobody_takes_part()


@on_worker0
def test_references_need_a_context(big_world):
    rref = jd.remote(rank(1), vector, args=(3,))
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(Exception, match="outside any context"):
            transform(lambda p: jnp.sum(jd.rpc_sync(rank(1), fast_product, args=(p, X))))(rref)
    found = jax.grad(lambda x: jnp.sum(jd.rpc_sync(rank(1), fast_product, args=(x, rref))))(X)  # only passed on
    assert_close(found, jnp.cos(X) * vector(3))
    wait_until_nobody_takes_part()
