"""Traversal of arguments and results, which takes the containers that JAX knows apart one level at a time.

JAX's own flattening loses the order of a dict, fails on keys that cannot be sorted, and warns about iterators, but
arguments of a remote call must arrive as they were sent.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from jdistgrad._compat import ARRAY
from jdistgrad.leaves import may_be_written

T = TypeVar("T")

# Types that JAX would take apart but calls must not.
OPAQUE: set[type] = set()

PLAIN = {bool, int, float, complex, str, bytes, type(None), np.ndarray}
LEAVES = PLAIN | {ARRAY}  # types of what is evidently a leaf


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    parts = _apart(tree)
    if parts is None:
        return change(tree)
    children, together = parts
    return together([map_leaves(change, child) for child in children])


def steady(tree: T) -> T:
    """Return the tree with copies of its lists, dicts and NumPy arrays that somebody may change; itself without any."""
    copies: dict[int, tuple[Any, Any]] = {}  # with the arrays, which keeps their ids their own

    def own(leaf: Any) -> Any:
        if not (isinstance(leaf, np.ndarray) and may_be_written(leaf)):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf, leaf.copy(order="K")
        return copies[id(leaf)][1]

    if all(own(leaf) is leaf for leaf in leaves(tree)) and not any(isinstance(one, list | dict) for one in nodes(tree)):
        return tree
    copied: T = map_leaves(own, tree)
    return copied


def leaves(tree: Any) -> Iterator[Any]:
    parts = _apart(tree)
    if parts is None:
        yield tree
    else:
        for child in parts[0]:
            yield from leaves(child)


def leaves_once(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree, however deep, in any order; those of a container that is in it several times once.

    A container that cannot be taken apart is left out.
    """
    waiting, seen = [tree], dict[int, Any]()
    while waiting:
        node = waiting.pop()
        try:
            parts = _apart(node)
        except Exception:  # of a user's class
            continue
        if parts is None:
            yield node
        elif id(node) not in seen:
            seen[id(node)] = node
            waiting += parts[0]


def nodes(tree: Any) -> Iterator[Any]:
    parts = _apart(tree)
    if parts is not None:
        yield tree
        for child in parts[0]:
            yield from nodes(child)


def paths(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the path of each leaf: the number of the child to take at each step.

    The path of a leaf stays the same if other leaves are replaced by trees.
    """
    parts = _apart(tree)
    if parts is None:
        yield path
    else:
        for number, child in enumerate(parts[0]):
            yield from paths(child, (*path, number))


def is_plain_tree(tree: Any, leaf_is_plain: Callable[[Any], bool]) -> bool:
    """Return whether a tree consists of only dicts, lists and tuples, and of plain leaves."""
    if type(tree) is dict:
        return all(type(key) in PLAIN and is_plain_tree(child, leaf_is_plain) for key, child in tree.items())
    if type(tree) in (list, tuple):
        return all(is_plain_tree(child, leaf_is_plain) for child in tree)
    return leaf_is_plain(tree)


def is_plain(value: Any) -> bool:
    """Return whether a value is evidently a leaf: the common case, quickly."""
    return type(value) in LEAVES or isinstance(value, jax.Array)


def _apart(node: Any) -> tuple[Iterable[Any], Callable[[list[Any]], Any]] | None:
    """Return a container's children, and a function that makes the container of others; None for a leaf.

    A dict is taken apart in the order of its keys, as by JAX, if they can be sorted, so that equal dicts match.
    """
    kind = type(node)
    if kind is list or kind is tuple:
        return node, kind
    if kind is dict or kind is defaultdict:
        try:
            keys = sorted(node)
        except TypeError:
            keys = list(node)

        def together(children: list[Any]) -> dict[Any, Any]:
            changed = dict(zip(keys, children, strict=True))
            ordered = {key: changed[key] for key in node}
            return defaultdict(node.default_factory, ordered) if kind is defaultdict else ordered

        return [node[key] for key in keys], together
    if kind in OPAQUE or is_plain(node) or isinstance(node, Iterator) or jax.tree_util.all_leaves([node]):
        return None
    asked = itertools.count()  # JAX takes apart the first node only, even if that node contains itself
    children, structure = jax.tree.flatten(node, is_leaf=lambda _: next(asked) > 0)
    return children, lambda changed: jax.tree.unflatten(structure, changed)
