"""Looking into arguments and results: JAX's pytrees, minus what trips them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

Path = Any

PLAIN = {bool, int, float, complex, str, bytes, type(None), np.ndarray}


def flatten(tree: Any, whole: type | tuple[type, ...] = ()) -> tuple[list[Any], Any]:
    """Leaves and structure. ``whole``: types not to look into.

    Iterators are leaves (JAX warns of them), and so is a tree that JAX cannot sort: a dict with keys of many kinds is
    an opaque object to it.
    """
    try:
        return jax.tree.flatten(tree, is_leaf=_opaque(whole))
    except (TypeError, ValueError):
        return jax.tree.flatten(tree, is_leaf=lambda node: True)


def leaves_with_path(tree: Any) -> list[tuple[Path, Any]]:
    try:
        return jax.tree_util.tree_leaves_with_path(tree, is_leaf=_opaque(()))
    except (TypeError, ValueError):
        return [((), tree)]


def are_plain(call: Sequence[Any]) -> bool:
    """Whether positional and keyword arguments are, at first sight, nothing to look into: the common case, quickly."""
    args, kwargs = call
    return not kwargs and all(type(arg) in PLAIN or isinstance(arg, jax.Array) for arg in args)


def has_traced_leaf(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in flatten(tree)[0])


def _opaque(whole: type | tuple[type, ...]) -> Callable[[Any], bool]:
    types = (whole if isinstance(whole, tuple) else (whole,)) + (Iterator,)
    return lambda node: isinstance(node, types)
