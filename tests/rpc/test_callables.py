"""Callables of every kind, as called functions and as arguments."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.worlds import on_worker0

import jdistgrad as jd


def call(function, args):
    return function(*args)


class Counter:
    def __init__(self, start):
        self.start = start

    def plus(self, x):
        return self.start + x

    @classmethod
    def make(cls, start):
        return cls(start).start

    @staticmethod
    def twice(x):
        return 2 * x

    def __call__(self, x):
        return -self.start - x


class WithFieldsOfItsOwn:
    """A user's callable object. Its fields have the names of attributes that the package gives its own functions."""

    takes_references = pure = True
    failed = False
    served_as = label = "a field"
    message = recorded_as = 7

    def __call__(self, x):
        if x < 0:
            raise ValueError("negative")
        return 2 * x

    def __reduce__(self):
        return WithFieldsOfItsOwn, ()


CALLABLES = [
    (jnp.add, (1, 2), 3),
    (operator.add, (1, 2), 3),
    (abs, (-2,), 2),
    (np.tanh, (0.5,), np.tanh(0.5)),
    (jax.nn.relu, (-2,), 0),
    (Counter(10).plus, (5,), 15),
    (Counter.make, (4,), 4),
    (Counter.twice, (4,), 8),
    (Counter(1), (5,), -6),
    (functools.partial(operator.sub, 10), (3,), 7),
]


@on_worker0
def test_fields_of_a_callable_object_mean_nothing_here(world):
    """The worker used to call ``failed`` and obey ``takes_references``: it never answered, and shutdown waited."""
    function, to = WithFieldsOfItsOwn(), jd.world_size() - 1
    assert jd.rpc_sync(to, function, args=(jd.RRef(4),)) == 8
    with pytest.raises(ValueError, match="negative") as raised:
        jd.rpc_sync(to, function, args=(-1,))
    assert "WithFieldsOfItsOwn" in "".join(raised.value.__notes__)


@jax.jit
def jitted(x):
    return x + 1


mapped = jax.vmap(Counter(1).plus)
derivative = jax.grad(jitted)


@jax.custom_vjp
def custom(x):
    return 2 * x


custom.defvjp(lambda x: (custom(x), None), lambda _, y: (2 * y,))


@on_worker0
def test_callables_of_every_kind(world):
    last = jd.world_size() - 1
    for function, args, expected in CALLABLES:
        assert jd.rpc_sync(last, function, args=args) == jd.rpc_sync(last, call, args=(function, args)) == expected
    assert jd.rpc_sync(last, Counter, args=(3,)).start == 3
    assert jd.rpc_sync(last, jitted, args=(1,)) == 2
    assert jd.rpc_sync(last, custom, args=(1.5,)) == 3
    assert jd.rpc_sync(last, mapped, args=(jnp.arange(2),)).tolist() == [1, 2]
    assert jd.rpc_sync(last, derivative, args=(1.5,)) == 1
    with jd.context():
        assert jax.grad(lambda x: jd.rpc_sync(last, mapped, args=(x,)).sum())(jnp.ones(2)).tolist() == [1, 1]
