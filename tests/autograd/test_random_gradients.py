"""Random graphs of calls over three workers: the serial program's first and second derivatives, and no scope left.

A program is a list of steps over a growing list of values: arrays, and references to arrays. It runs twice: serially,
and with calls to workers.
"""

import jax
import jax.numpy as jnp
from helpers.data import assert_close
from hypothesis import HealthCheck, given, settings, strategies as st

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker

VALUES = st.integers(0, 20)  # the index of a value; taken modulo the number of values so far
RANKS = st.integers(0, 2)
PATHS = st.lists(RANKS, min_size=1, max_size=3)
FUNCTIONS = st.sampled_from(["mix", "fast_bend"])

STEPS = st.one_of(
    st.tuples(st.just("call"), FUNCTIONS, RANKS, VALUES, VALUES),
    st.tuples(st.just("remote"), FUNCTIONS, RANKS, VALUES, VALUES),
    st.tuples(st.just("relay"), FUNCTIONS, PATHS, VALUES, VALUES),
    st.tuples(st.just("fan"), FUNCTIONS, PATHS, VALUES, VALUES),
    st.tuples(st.just("unused"), FUNCTIONS, RANKS, VALUES, VALUES),
    st.tuples(st.just("fetch"), VALUES),
)


def mix(a, b):
    return jnp.sin(a) * b + 0.5 * a


def bend(a, b):
    return jnp.tanh(a * b) - b


fast_bend = jax.jit(bend)


def relay(path, name, a, b):
    return jd.rpc_sync(path[0], relay, args=(path[1:], name, a, b)) if path else globals()[name](a, b)


class Serial:
    """The steps of a program, run in this process."""

    def local(self, value):
        return value

    def call(self, name, rank, a, b):
        return [globals()[name](a, b)]

    remote = relay = call

    def fan(self, name, path, a, b):
        return [globals()[name](a, b) * (k + 1) for k in range(len(path))]

    def unused(self, name, rank, a, b):
        return []

    def fetch(self, a):
        return [a]


class Remote(Serial):
    def local(self, value):
        return value.to_here() if isinstance(value, jd.RRef) else value

    def call(self, name, rank, a, b):
        return [jd.rpc_sync(rank, globals()[name], args=(a, b))]

    def remote(self, name, rank, a, b):
        return [jd.remote(rank, globals()[name], args=(a, b))]

    def relay(self, name, path, a, b):
        return [jd.rpc_sync(path[0], relay, args=(path[1:], name, a, b))]

    def fan(self, name, path, a, b):
        futures = [jd.rpc_async(rank, globals()[name], args=(a, b)) for rank in path]
        return [future.result() * (k + 1) for k, future in enumerate(futures)]

    def unused(self, name, rank, a, b):
        self.call(name, rank, a, b)
        self.remote(name, rank, a, b)
        return []

    def fetch(self, a):
        return [self.local(a)]


def program(steps, used, calls):
    """Return a program as a scalar function of an array and a parameter."""

    def loss(x, parameter):
        values = [x, parameter, x * 2]
        for name, *details in steps:
            given = [values[one % len(values)] for one in details[-(1 if name == "fetch" else 2) :]]
            values += getattr(calls, name)(*details[: -len(given)], *given)
        chosen = {one % len(values) for one in used}
        return sum(jnp.sum(calls.local(values[k]) * (k + 1.0)) for k in sorted(chosen))

    return loss


def second(loss, x, parameter):
    return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, parameter) * jnp.cos(x)))(x)


def make():
    return jnp.array([0.3, -0.7])


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(STEPS, max_size=7), st.lists(VALUES, min_size=1, max_size=3))
def check_program(steps, used):
    x, parameter = jnp.array([0.9, -0.4]), jd.remote(1, make)
    serial, remotely = program(steps, used, Serial()), program(steps, used, Remote())
    with jd.context():
        value, (of_x, of_parameter) = jd.value_and_grad(remotely, argnums=(0, 1))(x, parameter)
        found = value, (of_x, of_parameter.to_here())
    assert_close(found, jax.value_and_grad(serial, argnums=(0, 1))(x, make()), rtol=1e-4, atol=1e-4)
    with jd.context():
        found = second(remotely, x, parameter)
    assert_close(found, second(serial, x, make()), rtol=1e-4, atol=1e-4)
    assert current_worker().scopes.identifiers() == []


def test_random_gradients(big_world):
    # All programs share one world, so that anything a program leaves behind shows.
    big_world.drive(check_program)
