"""Transformations of programs with remote calls: derivatives of every order, vmap, jit and scan."""

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close
from helpers.programs import fast_product, product, serial, sync, vector
from helpers.worlds import on_worker0, rank

import jdistgrad as jd
from jdistgrad.errors import DifferentiationError


def chain(call, x):
    return jnp.sum(call(2, product, call(1, fast_product, x, x * x), x) ** 2)


def second(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x)))


TRANSFORMED = {
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of hessian": lambda f: jax.jit(jax.jacrev(jax.grad(f))),
    "jit of grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    "vmap of hessian": lambda f: lambda x: jax.vmap(jax.jacrev(jax.grad(f)))(rows(x)),
    "second of vmap": lambda f: second(lambda x: jnp.sum(jax.vmap(f)(rows(x)) ** 2)),
    "vmap of vmap of grad": lambda f: lambda x: jax.vmap(jax.vmap(jax.grad(f)))(rows(x).reshape(2, 2, 3)),
    "jit of grad of scan": lambda f: jax.jit(jax.grad(lambda x: repeated(f, x))),
}


def rows(x):
    return jnp.stack([x, x * 2, x - 1, x[::-1]])


def repeated(f, x):
    return jax.lax.scan(lambda total, one: (total * 0.5 + f(one) * f(x), None), 0.0, rows(x))[0]


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
@on_worker0
def test_every_transformation(big_world, transform):
    x = vector(3) / 2
    with jd.context():
        found = transform(lambda x: chain(sync, x))(x)
    assert_close(found, transform(lambda x: chain(serial, x))(x), rtol=1e-4, atol=1e-4)


def chosen(call, params, x):
    """Make one of two values by a call, as an element of a batch decides."""
    yes, no = (lambda params, x: call(1, fast_product, params, x)), (lambda params, x: x**3)
    return jnp.sum(jax.lax.cond(x[0] > 0, yes, no, params, x) ** 2)


@pytest.mark.parametrize("stage", [lambda f: f, jd.jit], ids=["eager", "jd.jit"])
@pytest.mark.parametrize("differentiate", [lambda f: f, jax.grad], ids=["value", "grad"])
@on_worker0
def test_a_reference_in_a_branch_that_differs_over_a_batch(world, differentiate, stage):
    # JAX repeats the reference's handle for each element. The value has as many rows as the batch, but is no batch.
    params, xs = vector(3), jnp.stack([vector(3), -vector(3), 2 * vector(3)])
    rref = jd.remote(rank(2), vector, args=(3,))

    def program(call, params, xs):
        return jnp.sum(jax.vmap(lambda x: chosen(call, params, x))(xs) * jnp.arange(1.0, 4.0))

    with jd.context():
        found = stage(lambda rref, xs: differentiate(lambda xs: program(sync, rref, xs))(xs))(rref, xs)
    assert_close(found, differentiate(lambda xs: program(serial, params, xs))(xs), rtol=1e-5)


@on_worker0
def test_a_reference_is_not_mapped_over(world):
    rref, xs = jd.remote(rank(2), vector, args=((5, 3),)), vector((5, 3))
    refused = pytest.raises(
        (TypeError, ValueError), match=r"jax\.vmap takes a reference with in_axes=None|vmap was requested|`length`"
    )
    call = lambda rref, x: sync(1, fast_product, rref, x)  # noqa: E731
    for program in (call, lambda rref, x: rref.to_here() * x):
        with refused:
            jax.vmap(program)(rref, xs)
        with refused:
            jax.lax.map(lambda both, program=program: program(*both), (rref, xs))
    assert_close(jax.vmap(call, in_axes=(None, 0))(rref, xs), jax.vmap(fast_product, (None, 0))(rref.to_here(), xs))


@on_worker0
def test_recordings_that_differ_over_a_batch_are_refused(world):
    xs, rref = jnp.stack([vector(3), -vector(3), 2 * vector(3)]), jd.remote(rank(2), vector, args=(3,))
    refused = pytest.raises(DifferentiationError)
    with jd.context():
        for stage in (lambda f: f, jax.jit, jd.jit):
            with refused:
                stage(jax.vmap(jax.grad(lambda x: chosen(sync, x, x))))(xs)
            with refused:
                stage(jd.grad(lambda rref, xs: jax.vmap(lambda x: chosen(sync, rref, x))(xs).sum()))(rref, xs)
        found = jax.grad(lambda xs: jax.vmap(lambda x: chosen(sync, x, x))(xs).sum())(xs)  # as the error says
    assert_close(found, jax.vmap(jax.grad(lambda x: chosen(serial, x, x)))(xs), rtol=1e-5)


@on_worker0
def test_a_call_is_transposed_by_its_pullback(world):
    function, x = jax.jit(lambda x: jd.rpc_sync(rank(1), product, args=(2.0, x))), vector(3)
    with jd.context():
        with pytest.raises(DifferentiationError):
            jax.linear_transpose(function, x)(x)
        assert_close(jax.vjp(function, x)[1](x)[0], jnp.sin(2.0) * x)
