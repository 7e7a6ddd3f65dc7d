"""How the static parts of a tree are spelled: equal parts alike, in every process; others differently."""

import dataclasses
import enum
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdistgrad.collectives.descriptions import enclosed, static_parts


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["part"])
@dataclasses.dataclass(frozen=True)
class Layer:
    w: object
    part: object


class Kind(enum.Enum):
    FIRST, SECOND = range(2)


@dataclasses.dataclass(frozen=True)
class Options:
    rate: float
    host: str = dataclasses.field(default="", compare=False)
    unset: int = dataclasses.field(init=False)


def spelled(part):
    return static_parts(jax.tree.structure({"a": [Layer(1.0, part), 2.0]}))


EQUAL = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"x", "y", "z"}, {"z", "y", "x"}),
    (Options(0.5, "node0"), Options(0.5, "node1")),
    (threading.Lock(), threading.Lock()),
    (np.dtype("float32"), np.dtype(np.float32)),
]

DIFFERENT = [
    (0.5, 0.25),
    (1, "1"),
    ("relu", b"relu"),
    (jax.nn.relu, jnp.tanh),
    (jnp.add, jnp.maximum),
    (functools.partial(jax.nn.celu, alpha=0.1), functools.partial(jax.nn.celu, alpha=0.2)),
    (Kind.FIRST, Kind.SECOND),
    ((1, (2, 3)), (1, (2, 4))),
    (Options(0.5), Options(0.75)),
    (np.dtype("float32"), np.dtype("float16")),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_parts_are_spelled_alike(one, other):
    assert spelled(one) == spelled(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_parts_are_spelled_differently(one, other):
    assert spelled(one) != spelled(other)


def test_containers_and_leaves_have_no_spelling():
    assert static_parts(jax.tree.structure({"a": [1.0, (2.0, None)], "b": {}})) == ()


def test_functions_among_the_leaves_are_parts():
    structure = jax.tree.structure(enclosed({"w": 1.0, "activation": jnp.tanh}))
    assert [part.rpartition(".")[2] for part in static_parts(structure)] == ["tanh"]
