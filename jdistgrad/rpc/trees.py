"""Looking into arguments and results: the containers JAX knows, taken apart one level at a time.

JAX's own flattening forgets the order of a dict, fails on keys that cannot be sorted, and warns of iterators. Arguments
of a remote call must arrive as they were sent.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

# Types that JAX would look into and calls must not.
WHOLE: set[type] = set()

PLAIN = {bool, int, float, complex, str, bytes, type(None), np.ndarray}


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with each leaf changed."""
    parts = _apart(tree)
    if parts is None:
        return change(tree)
    children, together = parts
    return together([map_leaves(change, child) for child in children])


def leaves(tree: Any) -> Iterator[Any]:
    parts = _apart(tree)
    if parts is None:
        yield tree
    else:
        for child in parts[0]:
            yield from leaves(child)


def paths(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """For each leaf, which child to take at each step. The same for a leaf when others are replaced by trees."""
    parts = _apart(tree)
    if parts is None:
        yield path
    else:
        for number, child in enumerate(parts[0]):
            yield from paths(child, (*path, number))


def leaves_with_keys(tree: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each leaf with its path, in JAX's keys, however deep. What contains itself is looked into once.

    JAX's own flattening of a tree that is too deep leaves the thread with no calls to make (jaxlib 0.10).
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    seen = set[int]()
    while waiting:
        path, node = waiting.pop()
        children = _children_with_keys(node)
        if children is None:
            yield path, node
        elif id(node) not in seen:
            seen.add(id(node))
            waiting += [((*path, *keys), child) for keys, child in reversed(children)]


def _children_with_keys(node: Any) -> list[tuple[tuple[Any, ...], Any]] | None:
    if isinstance(node, Iterator) or jax.tree_util.all_leaves([node]):
        return None
    try:
        return jax.tree_util.tree_flatten_with_path(node, is_leaf=_below())[0]
    except Exception:  # a dict whose keys cannot be sorted, a class of a user's that cannot be taken apart
        return None


def _below() -> Callable[[Any], bool]:
    """Lets JAX look into the first node it asks for only: also where that contains itself."""
    asked = itertools.count()
    return lambda _: next(asked) > 0


def is_plain_tree(tree: Any, leaf_is_plain: Callable[[Any], bool]) -> bool:
    """Whether a tree is made of nothing but dicts, lists and tuples, and of leaves that are plain."""
    if type(tree) is dict:
        return all(type(key) in PLAIN and is_plain_tree(child, leaf_is_plain) for key, child in tree.items())
    if type(tree) in (list, tuple):
        return all(is_plain_tree(child, leaf_is_plain) for child in tree)
    return leaf_is_plain(tree)


def are_plain(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether arguments are, at first sight, nothing to look into: the common case, quickly."""
    return not kwargs and all(_is_plain(arg) for arg in args)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, jax.Array)


def _apart_dict(node: dict[Any, Any]) -> tuple[Iterable[Any], Callable[[list[Any]], Any]]:
    """Children in the order of the keys, as in JAX, where they have one: two dicts of one meaning are one tree."""
    try:
        keys = sorted(node)
    except TypeError:
        keys = list(node)

    def together(children: list[Any]) -> dict[Any, Any]:
        changed = dict(zip(keys, children, strict=True))
        return {key: changed[key] for key in node}

    return [node[key] for key in keys], together


def _apart(node: Any) -> tuple[Iterable[Any], Callable[[list[Any]], Any]] | None:
    """A container's children, and how to put others in their place; None for a leaf."""
    kind = type(node)
    if kind is dict:
        return _apart_dict(node)
    if kind is list or kind is tuple:
        return node, kind
    if kind in WHOLE or _is_plain(node) or isinstance(node, Iterator) or jax.tree_util.all_leaves([node]):
        return None
    children, structure = jax.tree.flatten(node, is_leaf=_below())
    return children, lambda changed: jax.tree.unflatten(structure, changed)
