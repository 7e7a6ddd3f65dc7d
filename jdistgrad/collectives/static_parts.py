"""The static parts of a tree, on which the ranks must agree: what its nodes hold beside their leaves.

Such as the activation of a module or its dropout rate. JAX compiles them into the program, and gradients of different
programs have the same shapes. Functions among the leaves, such as the activations of an equinox module, count too.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, type(None))
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, enum.Enum)  # whose repr says all


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Enclosed:
    """A function, say, as a node without leaves, so that JAX takes it for a part of the tree's structure."""

    value: Any


def has_functions(tree: Any) -> bool:
    return any(map(callable, jax.tree.leaves(tree)))


def enclosed(tree: Any) -> Any:
    """Enclose every function among the leaves of a tree."""
    return jax.tree.map(lambda leaf: Enclosed(leaf) if callable(leaf) else leaf, tree)


def is_enclosed(node: Any) -> bool:
    return isinstance(node, Enclosed)


def opened(tree: Any) -> Any:
    """Return the tree that ``enclosed`` was given."""
    return jax.tree.map(lambda node: node.value if is_enclosed(node) else node, tree, is_leaf=is_enclosed)


def removed(tree: Any) -> Any:
    """Return a tree with None for every enclosed function: a function has no gradient."""
    return jax.tree.map(lambda node: None if is_enclosed(node) else node, tree, is_leaf=is_enclosed)


def on_opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes arguments with enclosed functions, and encloses the functions in its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = opened((args, kwargs))
        return enclosed(function(*args, **kwargs))

    return call


def static_parts(structure: Any) -> tuple[str, ...]:
    """Spell the static parts of a tree's structure, in order: equal parts are spelled alike in every process.

    Of a part that has no such spelling, the type is given. Keys are left out: paths of leaves have them.
    """
    if structure.node_data() is None:  # a leaf
        return ()
    kind, fixed = structure.node_data()
    found = [_spelled(fixed.value)] if kind is Enclosed else []
    if kind is not Enclosed and kind not in CONTAINERS:
        found = [f"{kind.__qualname__}: {_spelled(fixed)}"]
    for child in structure.children():
        found += static_parts(child)
    return tuple(found)


def _spelled(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, functools.partial):
        return f"partial{_spelled((value.func, value.args, value.keywords))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind: Any = type(value)
        fields = dataclasses.fields(value) if kind.__dataclass_params__.eq else ()  # else only its identity counts
        return type(value).__qualname__ + _spelled([getattr(value, one.name, None) for one in fields if one.compare])
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_spelled(key)}: {_spelled(one)}' for key, one in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_spelled, value)))}}}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)  # of a function or a class
    return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else type(value).__qualname__
