"""Functions between processes: by name where the name leads back to them, registered ones, all others by value."""

import functools
import importlib
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdistgrad as jd
from jdistgrad.rpc import functions
from jdistgrad.rpc.codec import PickleCodec


def top_level(x):
    return x


def another(x):
    return x


fast = jax.jit(top_level)


@jax.custom_vjp
def ruled(x):
    return x


ruled.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))

CALLS = []


def carried(value):
    codec = PickleCodec()
    return codec.decode(codec.encode(value, snapshot=True))


@pytest.mark.parametrize("function", [top_level, ruled, math.sin, jnp.add, np.add, str.upper, optax.adam])
def test_importable_functions_arrive_as_themselves(function):
    assert carried(function) == function


def test_a_name_that_is_anothers_now_is_not_used(monkeypatch):
    before = top_level
    monkeypatch.setitem(globals(), "top_level", another)
    assert carried(before) is not another
    assert carried(before).__code__ is not another.__code__


def scaled(by, noted=None):
    def decorate(function):
        @functools.wraps(function)
        def call(x):
            return by * function(x), noted

        return call

    return decorate


class Power:
    def __init__(self, exponent):
        self.exponent = exponent

    def of(self, x):
        return x**self.exponent


MADE = {
    "lambda": lambda x: 3 * x,
    "jit": fast,
    "jit with static arguments": functools.partial(jax.jit(lambda n, x: x * n, static_argnums=0), 3),
    "vmap": jax.vmap(another, in_axes=1),
    "grad": jax.grad(lambda x: jnp.sum(x**3)),
    "checkpoint": jax.checkpoint(jnp.sin),
    "jit of vmap": jax.jit(jax.vmap(top_level)),
    "decorated": scaled(2, noted=[1])(top_level),
    "method": Power(3).of,
    "vmap of a method": jax.vmap(Power(2).of),
    "partial": functools.partial(jnp.power, 2.0),
    "array": functools.partial(lambda a, x: a @ x, jnp.arange(9.0).reshape(3, 3)),
}


@pytest.mark.parametrize("function", MADE.values(), ids=MADE)
def test_other_functions_do_the_same_there(function):
    x = jnp.arange(9.0).reshape(3, 3)
    jax.tree.map(np.testing.assert_array_equal, carried(function)(x), function(x))


def recursive(base):
    def power(n, factor=base, *, plus=0):
        return plus + (1 if n == 0 else factor * power(n - 1))

    power.label = "a power"
    return power


def test_a_closure_may_call_itself_and_keeps_defaults_and_attributes():
    found = carried(recursive(3))
    assert (found(2), found(1, plus=1), found.label, found.__qualname__) == (9, 4, "a power", recursive(3).__qualname__)


def test_closures_use_the_globals_of_their_module_there():
    carried(lambda: CALLS.append(1))()
    assert CALLS.pop() == 1


def test_what_comes_by_the_same_bytes_is_the_same_function():
    def made(scale):
        return jax.jit(lambda x: scale * x)

    assert carried(made(2.0)) is carried(made(2.0))
    assert carried(made(2.0)) is not carried(made(3.0))


def test_what_a_closure_holds_now_is_sent():
    held = [1]
    function = lambda: held[0]  # noqa: E731 without a name of its own
    assert carried(function)() == 1
    held[0] = 2
    assert carried(function)() == 2


@pytest.fixture
def cell(monkeypatch):
    """Return a function that runs a notebook's cell, in a ``__main__`` without a file."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return lambda text: exec(text, vars(main)) or main


def test_functions_of_a_notebook_are_the_receivers_own_if_they_are_alike(cell):
    main = cell("seen = []\ndef note(x, n=1):\n    seen.append(x)\n    return n\n")
    assert carried(main.note) is main.note


def test_functions_that_a_notebook_has_defined_again_are_the_new_ones(cell):
    codec = PickleCodec()
    main = cell("rate = 2\ndef half(x):\n    return rate * x\n\ndef scale(x, n=1):\n    return n * half(x)\n")
    first = codec.encode(main.scale, snapshot=True)
    cell("rate = 3\ndef scale(x, n=2):\n    return n * half(x)\n")
    second = codec.encode(main.scale, snapshot=True)
    assert codec.decode(second)(1) == 6
    assert codec.decode(first)(1) == 3  # with this worker's own ``half``
    assert codec.decode(first) is not main.scale


def test_classes_of_a_notebook_are_the_receivers_own_or_else_copies(cell):
    codec = PickleCodec()
    main = cell("class Pair:\n    def __init__(self, a):\n        self.a = a\n")
    sent = codec.encode(main.Pair(3), snapshot=True)
    assert type(codec.decode(sent)) is main.Pair
    del main.Pair
    assert codec.decode(sent).a == 3


def test_objects_of_classes_without_a_name_travel():
    nameless = type("CheckpointPower", (Power,), {"__module__": __name__})  # flax's nn.remat makes such classes
    assert carried(nameless(3)).of(2) == 8


def test_a_module_that_the_other_side_does_not_have(monkeypatch, tmp_path):
    (tmp_path / "only_here.py").write_text("def function():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    codec = PickleCodec()
    sent = codec.encode(importlib.import_module("only_here").function, snapshot=True)
    monkeypatch.delitem(sys.modules, "only_here")
    (tmp_path / "only_here.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(jd.FunctionError):
        codec.decode(sent)


def test_files_are_not_sent_as_what_they_contain(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(jd.EncodingError):
        carried(file)


TRANSFORMATIONS = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "a lambda": optax.sgd(lambda step: 0.1 / (1 + step)),
    "several steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "several": optax.multi_transform({"a": optax.lion(1e-3), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "jitted": optax.GradientTransformation(optax.adam(1e-2).init, jax.jit(optax.adam(1e-2).update)),
}
PARAMETERS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
GRADIENTS = jax.tree.map(lambda leaf: leaf + 0.5, PARAMETERS)


@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_optax_transformations_do_the_same_elsewhere(tx):
    found = carried(tx)
    expected, _ = tx.update(GRADIENTS, tx.init(PARAMETERS), PARAMETERS)
    updates, _ = found.update(GRADIENTS, found.init(PARAMETERS), PARAMETERS)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


def test_whatever_can_be_called_can_be_registered():
    double = jd.register(functools.partial(math.pow, 2), "double")
    assert carried(double) is double
    assert carried([double])[0] is double


def test_the_latest_registration_of_a_name_counts():
    def make(k):
        return lambda: k

    first, second, third = make(1), make(2), make(3)
    jd.register(first, "a")
    jd.register(first, "b")
    jd.register(second, "a")
    jd.register(third, "b")
    assert carried(second) is second
    assert functions.registered("b")() == 3
    assert carried(first) is not first
    assert carried(first)() == 1
