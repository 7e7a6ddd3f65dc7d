"""Pytrees of every class a program may use, each around two arrays of floats."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax


class Named(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    a: Any
    b: Any
    label: str = dataclasses.field(default="data", metadata={"static": True})


@flax.struct.dataclass
class Struct:
    a: Any
    b: Any
    label: str = flax.struct.field(pytree_node=False, default="struct")


MAKERS = {
    "dict": lambda a, b: {"a": a, "b": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "named": Named,
    "data": Data,
    "struct": Struct,
    "adam": lambda a, b: optax.ScaleByAdamState(jnp.asarray(3), {"m": a}, {"m": b}),
    "momentum": lambda a, b: (optax.TraceState(trace=a), optax.EmptyState(), None, [optax.TraceState(trace=b)]),
    "deep": lambda a, b: Data(Struct({"a": a}, []), Named(None, (b,))),
}


def floats(tree: Any) -> list[Any]:
    """Return a tree's arrays of floats, without its counters and keys."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def refilled(tree: Any, *arrays: Any) -> Any:
    """Return the same tree with other arrays of floats."""
    rest = iter(arrays)
    return jax.tree.map(lambda leaf: next(rest) if is_float(leaf) else leaf, tree)


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
