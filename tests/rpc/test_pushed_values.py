"""Pushed values: what arrives is what was sent, and a value that differs only in numbers is not pickled again."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.rpc import trees
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.wire import pinned
from jdistgrad.wire.message import Parcel


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    left: object
    right: object


@jax.tree_util.register_pytree_node_class
class OnlyArrays:
    """A node that refuses whatever is no array, as some users' classes do."""

    def __init__(self, array):
        self.array = array
        assert hasattr(array, "shape")

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


class Counting(PickleCodec):
    """A codec that counts the values it has pickled."""

    pickled = 0

    def _pickled(self, *args, **kwargs):
        self.pickled += 1
        return super()._pickled(*args, **kwargs)


def equal(found, expected):
    if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in trees.leaves(expected)):
        return found == expected
    same = jax.tree.structure(found) == jax.tree.structure(expected)
    return same and all(map(one_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


def one_equal(found, expected):
    if not isinstance(expected, jax.Array | np.ndarray):
        return found == expected
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and np.array_equal(found, expected)


def sent(codec, key, value):
    return codec.decode_pushed(codec.encode_pushed(key, value))


def arrived(value, key=(3, -1)):
    codec = PickleCodec()
    for _ in range(2):
        got_key, got = sent(codec, key, value)
        assert got_key == key
    return got


ARRAYS = {
    "one array": jnp.arange(5.0),
    "no array": (),
    "a number as an array": jnp.zeros((), jnp.float32),
    "an empty array": jnp.zeros((0, 3)),
    "bfloat16 and bool": (jnp.ones((2, 3), jnp.bfloat16), jnp.array([True, False])),
    "NumPy, not contiguous": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    "a tree": {"b": [jnp.ones(3), None], "a": Pair(np.ones((2, 1), np.float32), (jnp.zeros(7, jnp.int32),))},
    "large": {"x": jnp.arange(1 << 16, dtype=jnp.float32), "y": jnp.ones(2)},
}
OTHERS = {
    "a string": "text",
    "numbers": [1, 2.5, None],
    "a weakly typed number": jnp.asarray(2.0),
    "arrays and a string": {"x": jnp.ones(3), "name": "x"},
    "objects in an array": np.array([None, "a"], object),
    "a structured array": np.zeros(2, [("a", "i4")]),
    "keys without an order": {1: 2, "a": 3},
    "a class for arrays only": OnlyArrays(jnp.arange(3.0)),
}


@pytest.mark.parametrize("value", [*ARRAYS.values(), *OTHERS.values()], ids=[*ARRAYS, *OTHERS])
def test_values_arrive_as_they_were(value):
    got = arrived(value)
    if isinstance(value, OnlyArrays):
        value, got = value.array, got.array
    assert type(got) is type(value) or isinstance(value, jax.Array)
    assert equal(got, value)


def test_a_random_key_arrives_as_one():
    assert equal(jax.random.key_data(arrived(jax.random.key(7))), jax.random.key_data(jax.random.key(7)))


def test_values_that_differ_only_in_numbers_are_pickled_once():
    codec = Counting()
    for number, value in enumerate([jnp.ones(3), jnp.zeros(3), 2 * jnp.ones(3)]):
        assert equal(sent(codec, (number,), value), ((number,), value))
    assert codec.pickled == 1
    for value in (jnp.ones(4), jnp.ones(3, jnp.int32), [jnp.ones(3)], np.ones(3, np.float32), {"b": np.ones(3)}):
        for _ in range(2):
            assert equal(sent(codec, (0,), value), ((0,), value))
    assert codec.pickled == 6
    for function in (jnp.add, jnp.sin, np.add, jax.nn.relu, equal):
        for number in range(2):
            assert sent(codec, (0,), (function, number * np.ones(2)))[1][0] is function
    assert codec.pickled == 11


def test_the_order_of_a_dict_and_what_is_the_same_object_stay():
    codec, one = PickleCodec(), np.ones(2)
    for value in ({"b": one, "a": 2 * one}, {"a": one, "b": 2 * one}) * 2:
        assert list(sent(codec, (), value)[1]) == list(value)
    empty = {}
    pairs = (one, 2 * one), (one, one), (one, 2 * one), (empty, empty), (empty, {})
    for first, second in pairs:
        _, (left, right, _) = sent(codec, (), [first, second, 3 * one])
        assert (left is right) == (first is second)


def made_with(number):
    def inner():
        return number

    def change(to):
        nonlocal number
        number = to

    return inner, change


inner, change = made_with(1)


def test_a_function_that_its_module_has_under_another_name_is_sent_as_it_is_now():
    codec = PickleCodec()
    for number in (1, 5):
        change(number)
        assert sent(codec, (), (inner, np.ones(1)))[1][0]() == number


def test_what_the_program_defines_is_sent_with_its_likeness(monkeypatch):
    """The receiver then asks for it, if its own differs."""
    codec, streams = PickleCodec(), []

    def added(x, y=1):
        return x + y

    added.__module__, added.__qualname__ = "__main__", "added"
    monkeypatch.setattr(sys.modules["__main__"], "added", added, raising=False)
    for default in (1, 5, 5):
        added.__defaults__ = (default,)
        streams.append(codec.encode((added, (np.ones(1),)), snapshot=True).stream)
    assert streams[0] != streams[1] == streams[2]


def test_what_may_be_written_to_may_be_written_to_there():
    codec = PickleCodec()
    for writeable in (False, True, False):
        array = np.ones(3, np.float32)
        array.flags.writeable = writeable
        parcel = codec.encode_pushed((), array)
        parcel.buffers = [memoryview(bytearray(one)) for one in parcel.buffers]  # as it arrives
        _, got = codec.decode_pushed(parcel)
        assert got.flags.writeable == writeable


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16", "int4"])
def test_arrays_of_odd_dtypes_arrive_each_time(dtype, make):
    codec, array = PickleCodec(), make(np.ones(3, jnp.dtype(dtype)))
    for _ in range(3):
        assert equal(sent(codec, (), array)[1], np.asarray(array))


def test_large_arrays_are_not_copied():
    codec, value = PickleCodec(), jnp.arange(1 << 16, dtype=jnp.float32)
    for _ in range(2):
        (buffer,) = codec.encode_pushed((0,), value).buffers
        assert np.frombuffer(buffer, np.uint8).ctypes.data == np.asarray(value).ctypes.data


@pytest.mark.parametrize(("accelerated", "kind"), [(False, np.ndarray), (True, jax.Array)])
def test_large_arrays_go_to_accelerators_once_and_need_not_go_anywhere_else(monkeypatch, accelerated, kind):
    monkeypatch.setattr(pinned, "accelerated", lambda: accelerated)
    codec = PickleCodec()
    parcel = codec.encode_pushed((0,), jnp.arange(1 << 16))
    _, got = codec.decode_pushed(Parcel(parcel.stream, [memoryview(bytes(parcel.buffers[0]))]))
    assert isinstance(got, kind)
    assert np.array_equal(got, np.arange(1 << 16))


def test_a_class_that_is_defined_again_arrives_as_the_new_one(monkeypatch):
    """As in a cell of a notebook that all processes run again. What a name stands for is not remembered."""
    codec = PickleCodec()
    for _ in range(2):
        again = dataclasses.make_dataclass("Pair", ["left", "right"])
        again.__module__ = __name__
        jax.tree_util.register_dataclass(again, ["left", "right"], [])
        monkeypatch.setitem(globals(), "Pair", again)
        for _ in range(3):
            _, got = sent(codec, (1,), again(jnp.ones(2), jnp.zeros(3)))
            assert type(got) is again
