"""Pushed values: what arrives is what was sent, also if pickle has to carry it, and a layout is written once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.rpc import trees
from jdistgrad.rpc.codec import PickleCodec
from jdistgrad.rpc.layouts import Layouts
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
    encoded = decoded = 0

    def encode(self, value, *, snapshot):
        self.encoded += 1
        return super().encode(value, snapshot=snapshot)

    def decode(self, parcel):
        self.decoded += 1
        return super().decode(parcel)


def equal(found, expected):
    if not any(isinstance(leaf, jax.Array | np.ndarray) for leaf in trees.leaves(expected)):
        return found == expected
    same = jax.tree.structure(found) == jax.tree.structure(expected)
    return same and all(map(one_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


def one_equal(found, expected):
    if not isinstance(expected, jax.Array | np.ndarray):
        return found == expected
    return (found.dtype, found.shape) == (expected.dtype, expected.shape) and np.array_equal(found, expected)


def layouts():
    codec = Counting()
    return Layouts(codec), codec


def arrived(value, key=(3, -1)):
    found, _ = layouts()
    got_key, got = found.decode(found.encode(key, value))
    assert got_key == key
    return got


LAID_OUT = {
    "one array": jnp.arange(5.0),
    "no array": (),
    "a number as an array": jnp.zeros((), jnp.float32),
    "an empty array": jnp.zeros((0, 3)),
    "bfloat16 and bool": (jnp.ones((2, 3), jnp.bfloat16), jnp.array([True, False])),
    "NumPy, not contiguous": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    "a tree": {"b": [jnp.ones(3), None], "a": Pair(np.ones((2, 1), np.float32), (jnp.zeros(7, jnp.int32),))},
    "large": {"x": jnp.arange(1 << 16, dtype=jnp.float32), "y": jnp.ones(2)},
}
PICKLED = {
    "a string": "text",
    "numbers": [1, 2.5, None],
    "a weakly typed number": jnp.asarray(2.0),
    "arrays and a string": {"x": jnp.ones(3), "name": "x"},
    "objects in an array": np.array([None, "a"], object),
    "a structured array": np.zeros(2, [("a", "i4")]),
    "keys without an order": {1: 2, "a": 3},
    "a class for arrays only": OnlyArrays(jnp.arange(3.0)),
}


@pytest.mark.parametrize("value", [*LAID_OUT.values(), *PICKLED.values()], ids=[*LAID_OUT, *PICKLED])
def test_values_arrive_as_they_were(value):
    got = arrived(value)
    if isinstance(value, OnlyArrays):
        value, got = value.array, got.array
    assert type(got) is type(value) or isinstance(value, jax.Array)
    assert equal(got, value)


def test_a_random_key_arrives_as_one():
    assert equal(jax.random.key_data(arrived(jax.random.key(7))), jax.random.key_data(jax.random.key(7)))


def test_a_layout_is_written_and_read_once():
    """The second value of a layout costs no pickling; one of another shape, dtype or tree does."""
    found, codec = layouts()
    for number, value in enumerate([jnp.ones(3), jnp.zeros(3), 2 * jnp.ones(3)]):
        assert equal(found.decode(found.encode((number,), value)), ((number,), value))
    assert (codec.encoded, codec.decoded) == (1, 1)
    for value in (jnp.ones(4), jnp.ones(3, jnp.int32), [jnp.ones(3)], np.ones(3, np.float32)):
        found.decode(found.encode((0,), value))
    assert (codec.encoded, codec.decoded) == (5, 5)


def test_large_arrays_are_not_copied():
    found, _ = layouts()
    value = jnp.arange(1 << 16, dtype=jnp.float32)
    (buffer,) = found.encode((0,), value).buffers
    assert np.frombuffer(buffer, np.uint8).ctypes.data == np.asarray(value).ctypes.data


@pytest.mark.parametrize(("accelerated", "kind"), [(False, np.ndarray), (True, jax.Array)])
def test_large_arrays_go_to_accelerators_once_and_need_not_go_anywhere_else(monkeypatch, accelerated, kind):
    monkeypatch.setattr(pinned, "accelerated", lambda: accelerated)
    found, _ = layouts()
    parcel = found.encode((0,), jnp.arange(1 << 16))
    _, arrived = found.decode(Parcel(parcel.stream, [memoryview(bytes(parcel.buffers[0]))]))
    assert isinstance(arrived, kind)
    assert np.array_equal(arrived, np.arange(1 << 16))


def test_a_class_that_is_defined_again_arrives_as_the_new_one(monkeypatch):
    """As in a cell of a notebook that all processes run again. What a name stands for is not remembered."""
    found, codec = layouts()
    for _ in range(2):
        again = dataclasses.make_dataclass("Pair", ["left", "right"])
        again.__module__ = __name__
        jax.tree_util.register_dataclass(again, ["left", "right"], [])
        monkeypatch.setitem(globals(), "Pair", again)
        before = codec.decoded
        for _ in range(3):
            _, got = found.decode(found.encode((1,), again(jnp.ones(2), jnp.zeros(3))))
            assert type(got) is again
        assert codec.decoded == before + 1
