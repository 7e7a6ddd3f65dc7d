"""Third derivatives, also of programs that take derivatives themselves; intermediate values stay with their owners."""

import jax
import jax.numpy as jnp
import pytest
from helpers.data import assert_close, sum_squares
from helpers.programs import fetched, handed_on, serial
from helpers.worlds import on_worker0

import jdistgrad as jd

X = jnp.array([0.3, -1.2, 2.0, 0.1])


def wave(x):
    return jnp.sin(x) * x


def halves(x):
    return {"low": x[:2] ** 2, "high": jnp.cos(x[2:]), "count": x.shape[0]}


def added(x, parts):
    return x[0] * parts["low"].sum() + (parts["high"] * x[2:]).sum() * parts["count"]


def one_value(call, x):
    return sum_squares(call(1, wave, x))


def linear_in_a_value(call, x):
    """Return a loss linear in remote values: their cotangents are constant, without derivatives of their own."""
    return (call(1, wave, x) * X).sum() + call(2, halves, x)["high"].sum()


def several_values(call, x):
    parts = call(2, halves, call(1, wave, x))
    return sum_squares(call(0, added, x, parts))


def by_itself(call, x):
    """Use both the value and the derivative of a part of the program."""
    value, pullback = jax.vjp(lambda x: call(1, wave, x), x)
    (back,) = pullback(jnp.cos(value))
    return sum_squares(call(2, wave, back)) + value.sum()


def up(f):
    return lambda x: (jax.grad(f)(x) * X**2).sum() ** 2


PROGRAMS = [one_value, linear_in_a_value, several_values, by_itself]


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit, jd.jit], ids=["eager", "jax.jit", "jd.jit"])
@pytest.mark.parametrize("way", [fetched, handed_on])
@pytest.mark.parametrize("program", PROGRAMS)
@on_worker0
def test_the_third_derivative(big_world, program, way, compiled):
    def third(call):
        return jax.grad(up(up(lambda x: program(call, x))))

    with jd.context():
        assert_close(compiled(third(way))(X), jax.jit(third(serial))(X), rtol=1e-3, atol=1e-3)
