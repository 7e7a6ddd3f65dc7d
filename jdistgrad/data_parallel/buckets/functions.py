"""Functions among the leaves of a tree, such as the activations of an equinox module: they stay as they are."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Enclosed:
    """A function as a node without leaves, so that JAX takes it for a part of the tree's structure."""

    function: Callable[..., Any]


def has_functions(tree: Any) -> bool:
    return any(map(callable, jax.tree.leaves(tree)))


def enclosed(tree: Any) -> Any:
    """Enclose every function among the leaves of a tree."""
    return jax.tree.map(lambda leaf: Enclosed(leaf) if callable(leaf) else leaf, tree)


def opened(tree: Any) -> Any:
    """Return the tree that ``enclosed`` was given."""
    return _replaced(tree, lambda one: one.function)


def removed(tree: Any) -> Any:
    """Return a tree with None for every enclosed function: a function has no gradient."""
    return _replaced(tree, lambda one: None)


def on_opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes arguments with enclosed functions, and encloses the functions in its result."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = opened((args, kwargs))
        return enclosed(function(*args, **kwargs))

    return call


def _replaced(tree: Any, change: Callable[[Enclosed], Any]) -> Any:
    def is_enclosed(node: Any) -> bool:
        return isinstance(node, Enclosed)

    return jax.tree.map(lambda node: change(node) if is_enclosed(node) else node, tree, is_leaf=is_enclosed)
