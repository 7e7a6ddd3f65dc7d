"""Comparison of saved values and states with the current ones, and conversion to the same kinds: pure functions."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jdistgrad.leaves import LeafSpec, plain
from jdistgrad.rpc import trees

NUMBERS = {bool, int, float, complex}


def difference(found: Any, known: Any) -> str | None:
    """Return the first difference in structure, shapes or dtypes, in words; None if there is none."""
    leaves = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (found, known)]
    theirs, ours = [{jax.tree_util.keystr(path): leaf for path, leaf in one.items()} for one in leaves]
    shown: list[Any] = [jax.tree.structure(tree) for tree in (found, known)]
    other = f"the structure is {shown[0]}, expected {shown[1]}" if shown[0] != shown[1] else None
    return first_difference(theirs, ours, _fits, _kind) or other


def first_difference(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    fits: Callable[[Any, Any], bool],
    spelled: Callable[[Any], str],
) -> str | None:
    """Return the first difference between leaves by place, in words; None if theirs fit."""
    for place, expected in ours.items():
        if place not in theirs:
            return f"{place} is missing, expected {spelled(expected)}"
        if not fits(theirs[place], expected):
            return f"{place} is {spelled(theirs[place])}, expected {spelled(expected)}"
    extra = next((place for place in theirs if place not in ours), None)
    return None if extra is None else f"{extra} is not expected; it is {spelled(theirs[extra])}"


def converted(found: Any, known: Any) -> Any:
    """Convert fitting values to the kinds of the known values, with the order of the known dicts.

    Arrays become copies on this worker, which nobody else writes to.
    """
    leaves = trees.leaves(found)
    return trees.map_leaves(lambda leaf: _at_home(next(leaves), leaf), known)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _fits(found: Any, expected: Any) -> bool:
    """Return whether a leaf fits. Files return Python numbers as arrays without dimensions."""
    if type(expected) in NUMBERS and _is_array(found):
        plain = isinstance(found.dtype, np.dtype) and found.ndim == 0
        return plain and np.can_cast(found.dtype, type(expected), "same_kind")
    return _kind(found) == _kind(expected)


def _kind(leaf: Any) -> str:
    return str(LeafSpec.of(leaf)) if _is_array(leaf) else f"a {type(leaf).__name__}"


def _at_home(found: Any, known: Any) -> Any:
    if isinstance(known, jax.Array):  # a copy: one restored from a file may be committed to another worker's device
        spec = LeafSpec.of(found if isinstance(found, jax.Array) else known)  # NumPy knows of no weak types
        return spec.restored(np.array(plain(found)))
    if isinstance(known, np.ndarray):
        return np.array(found)
    return type(known)(found.item()) if type(known) in NUMBERS and _is_array(found) else found
