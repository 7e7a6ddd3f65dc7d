"""Blueprints of modules: equal for equal modules, and refused for values that cannot be built."""

import dataclasses
import pickle
import threading

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx
from helpers.data import assert_close
from helpers.models import Both, Encoder, X
from helpers.worlds import last, on_worker0

from jdistgrad.modules.flax_modules import blueprint
from jdistgrad.modules.function import RemoteModule


@on_worker0
def test_what_is_no_module_is_refused(big_world):
    for module in (3, Encoder, Both(4, 3, rngs=nnx.Rngs(0)), Encoder(3, threading.Lock()), Encoder(3)):
        with pytest.raises(TypeError, match="RemoteModule"):
            RemoteModule(last(), module)


@pytest.mark.parametrize("layers", [(nn.Dense(3), nn.relu), [nn.Dense(3)], {"a": nn.Dense(3)}, {3, 4}])
def test_a_blueprint_builds_an_equal_module(layers):
    module, made = Encoder(2, layers), blueprint(Encoder(2, layers))
    assert hash(made) == hash(blueprint(module))
    assert made == blueprint(module)
    assert made != blueprint(Encoder(3, layers))
    assert made.make() == module


def scaled(by):
    return lambda x: x * by


@pytest.mark.parametrize("layer", [scaled(3), scaled((scaled(2), "a")), nn.initializers.normal(0.5, jnp.bfloat16)])
def test_functions_that_others_have_made_are_made_again(layer):
    made = pickle.loads(pickle.dumps(blueprint(Encoder(2, (layer,)))))
    assert made == blueprint(Encoder(2, (layer,)))
    assert hash(made) == hash(blueprint(Encoder(2, (layer,))))
    assert made != blueprint(Encoder(2, (scaled(3.0),)))
    (found,) = made.make().layers
    assert found is not layer
    assert (found.__code__, found.__qualname__) == (layer.__code__, layer.__qualname__)


SHARED = nn.Dense(4)


class Twice(nn.Module):
    """A module that applies two others, which may be one and the same."""

    first: nn.Module
    second: nn.Module

    def __call__(self, x):
        return self.second(nn.tanh(self.first(x)))


@pytest.mark.parametrize(
    "module",
    [
        Twice(SHARED, SHARED),
        Twice(nn.Sequential([SHARED, nn.tanh]), nn.Sequential([nn.Dense(4), SHARED])),
        Twice(nn.Sequential([SHARED, nn.relu, SHARED]), nn.Dense(4)),
    ],
    ids=["fields", "nested", "list"],
)
@on_worker0
def test_a_module_used_twice_is_one_module_on_its_owner_too(big_world, module):
    variables, remote = module.init(jax.random.key(3), X), RemoteModule(last(), module, (X,), rng=3)
    assert_close(remote.parameters.to_here(), variables["params"])
    assert_close(remote(X), module.apply(variables, X))


@on_worker0
def test_a_module_of_flax_that_holds_a_set(big_world):
    module = nn.WeightNorm(nn.Dense(4))
    variables, remote = module.init(jax.random.key(3), X), RemoteModule(last(), module, (X,), rng=3)
    assert_close(remote(X), module.apply(variables, X))


def test_modules_that_share_a_part_are_not_those_that_have_equal_parts():
    assert blueprint(Twice(SHARED, SHARED)) != blueprint(Twice(nn.Dense(4), nn.Dense(4)))


class Power(nn.Module):
    exponent: float

    def __call__(self, x):
        return x**self.exponent


@on_worker0
def test_modules_whose_settings_differ_in_type_are_different_modules(big_world):
    numbers = jnp.arange(4)
    for exponent in (2, 2.0):
        found, expected = RemoteModule(last(), Power(exponent), (numbers,))(numbers), numbers**exponent
        assert_close(found, expected)
        assert found.dtype == expected.dtype


@dataclasses.dataclass(frozen=True)
class Scale:
    """An activation that equals others of its name."""

    name: str
    factor: object = dataclasses.field(compare=False)

    def __call__(self, x):
        return x * self.factor


class Activated(nn.Module):
    activation: Scale

    def __call__(self, x):
        return self.activation(x)


@on_worker0
def test_modules_with_settings_that_are_equal_but_not_alike_are_different_modules(big_world):
    for factor in (2.0, 3.0, 2.0):
        assert_close(RemoteModule(last(), Activated(Scale("a", factor)), (X,))(X), X * factor)
    assert blueprint(Activated(Scale("a", 2.0))) == blueprint(Activated(Scale("a", 2.0)))


class Given(nn.Module):
    def __call__(self, x, activation):
        return activation(x)


@on_worker0
def test_settings_of_a_call_that_are_equal_but_not_alike_are_different_settings(big_world):
    module = RemoteModule(last(), Given(), (X, nn.relu))
    for factor in (2.0, 3.0, 2.0):
        assert_close(module(X, Scale("a", factor)), X * factor)
