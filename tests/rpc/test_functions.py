"""Functions that travel by their import path, and registered functions."""

import functools
import math
import types

import jax
import numpy as np
import pytest

import jdistgrad as jd
from jdistgrad.errors import EncodingError, FunctionError
from jdistgrad.rpc import functions, named
from jdistgrad.rpc.codec import PickleCodec


def top_level(x):
    return x


def another(x):
    return x


fast = jax.jit(top_level)
batched = jax.vmap(top_level)
derivative = jax.grad(top_level)


def carried(value):
    codec = PickleCodec(allow_code=False)
    return codec.decode(codec.encode(value, snapshot=True))


@pytest.mark.parametrize("function", [top_level, fast, batched, derivative, math.sin, jax.numpy.add, str.upper])
def test_importable_functions_arrive_as_themselves(function):
    assert carried(function) == function


def defined_before():
    """Return what a cell of a notebook holds after another has defined its function again."""
    return types.FunctionType(top_level.__code__, globals(), "top_level")


@pytest.mark.parametrize("made", [lambda old: old, jax.jit, jax.vmap], ids=["itself", "jit", "vmap"])
def test_the_error_of_a_function_that_was_defined_again_says_so(made):
    with pytest.raises(FunctionError, match=r"test_functions\.top_level .* it has been defined again since"):
        carried(made(defined_before()))
    with pytest.raises(FunctionError, match=r"this one is made of test_functions\.top_level, as by jax\.vmap"):
        carried(jax.jit(top_level))


def test_the_error_of_an_object_whose_class_was_defined_again_says_so():
    before = type("Power", (), {"__module__": __name__})()
    with pytest.raises(EncodingError, match=r"'test_functions\.Power'.*It has been defined again since"):
        carried(before)


def test_the_error_of_an_object_whose_class_has_no_name_says_how_to_send_it():
    # flax's nn.remat and nn.vmap make such classes
    nameless = type("CheckpointPower", (), {"__module__": __name__})
    with pytest.raises(EncodingError, match=r"CheckpointPower.*Define it at the top level.*or register it"):
        carried(nameless())


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


ALIKE = [
    jax.vmap(Power(2).of),
    jax.vmap(Power(3).of),
    scaled(2)(top_level),
    scaled(2.5)(top_level),
    scaled(2)(another),
    jax.jit(scaled(3)(top_level)),
    jax.jit(scaled(4)(top_level)),
    jax.jit(top_level),
    jax.jit(another),
    jax.vmap(top_level),
    jax.vmap(another),
    jax.vmap(top_level, in_axes=1),
    jax.vmap(jax.jit(top_level)),
    jax.jit(jax.vmap(top_level)),
    jax.grad(top_level),
    jax.grad(another),
    jax.value_and_grad(top_level),
    jax.value_and_grad(top_level, argnums=(0,)),
    jax.checkpoint(top_level),
    jax.hessian(top_level),
    jax.jacrev(top_level),
]


@pytest.mark.parametrize("turn", range(len(ALIKE)))
def test_a_name_that_several_functions_have_in_turn_finds_no_other_one(monkeypatch, turn):
    codec = PickleCodec(allow_code=False)
    monkeypatch.setitem(globals(), "in_turn", ALIKE[turn])
    sent = codec.encode(ALIKE[turn], snapshot=True)
    assert codec.decode(sent) is ALIKE[turn]
    for other in ALIKE[:turn] + ALIKE[turn + 1 :]:
        monkeypatch.setitem(globals(), "in_turn", other)
        with pytest.raises(jd.FunctionError, match=r"in_turn is another function on this worker .* name of its own"):
            codec.decode(sent)


@pytest.mark.parametrize("made", [lambda f: f, jax.jit, jax.vmap])
def test_a_function_that_no_text_tells_from_others_has_no_name(monkeypatch, made):
    for held in (np.ones(3), []):
        function = made(scaled(held)(top_level))
        monkeypatch.setitem(globals(), "in_turn", function)
        with pytest.raises(jd.FunctionError, match=r"top_level .* no name of its own there that tells it from others"):
            carried(function)


@pytest.mark.parametrize("function", [another, fast], ids=["plain", "jitted"])
def test_a_function_that_the_other_side_has_not_defined_yet(monkeypatch, function):
    codec, name = PickleCodec(allow_code=False), named.import_path(function)[1]
    sent = codec.encode(function, snapshot=True)
    monkeypatch.delitem(globals(), name)
    with pytest.raises(jd.FunctionError, match=rf"{name}.* above jd.init\(\)"):
        codec.decode(sent)


def test_a_jitted_function_may_have_a_name_of_its_own():
    assert named.import_path(fast) == (__name__, "fast")
    assert named.import_path(lambda: 1) is None


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
    with pytest.raises(jd.FunctionError, match="register"):
        carried(first)


def test_a_function_is_not_taken_for_a_dead_one_with_its_address():
    def make(k):
        def closure():
            return k

        return closure

    for k in range(50):
        jd.register(make(k), "loop")
    strangers = [make(k) for k in range(50)]
    assert all(functions.registered_name(stranger) is None for stranger in strangers)
