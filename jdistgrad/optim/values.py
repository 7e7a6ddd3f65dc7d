"""The values of references: their float arrays, which are optimized, and how saved values fit them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.values.holes import Hole, Layout, has_gradient, is_float_array, shape_of, split
from jdistgrad.leaves import LeafSpec, plain
from jdistgrad.rpc import api, trees
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.rref import RRef

ARRAYS = jax.Array, np.ndarray, np.generic
NUMBERS = {bool, int, float, complex}
LEAF = jax.tree.structure(0)


class Value(NamedTuple):
    """A reference's value, flattened: its float arrays, their tree, and the layout of the rest."""

    leaves: list[Any]
    tree: Any
    layout: Layout

    @classmethod
    def of(cls, whole: Any) -> "Value":
        if isinstance(whole, jax.Array) and has_gradient(whole):
            return cls([whole], LEAF, Layout(Hole(), (0,)))
        layout, leaves = split(whole, is_float_array)
        return cls(leaves, jax.tree.structure(floats(whole)), layout)


class ValueForm:
    """A cache of the structure of one reference's values, which makes ``Value.of`` about ten times as fast.

    It refers to no array that has a gradient, so that replaced values are freed.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._kinds: list[Any] = []  # the dtypes of leaves that have a gradient, and all other leaves themselves
        self._tree: Any = None
        self._layout: Any = None

    def take_apart(self, whole: Any) -> Value:
        leaves, structure = jax.tree.flatten(whole)
        if self._structure is not None and structure == self._structure:
            each = list(zip(leaves, self._kinds, strict=True))
            if all(one is kind or (isinstance(one, jax.Array) and one.dtype is kind) for one, kind in each):
                return Value([one for one, kind in each if one is not kind], self._tree, self._layout)
        found = Value.of(whole)
        same = [id(leaf) for leaf in leaves if has_gradient(leaf)] == list(map(id, found.leaves))
        self._structure = structure if same else None  # JAX flattens values with references in another way
        self._kinds = [leaf.dtype if has_gradient(leaf) else leaf for leaf in leaves]
        self._tree, self._layout = found.tree, found.layout
        return found


def shapes_of(leaves: Sequence[Any]) -> list[Any]:
    """Return the shapes of leaves, and trees of shapes for references: each owner is asked once."""
    there = dict[int, dict[int, Any]]()
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, RRef):
            there.setdefault(leaf.owner.rank, {})[k] = leaf
    found = dict[int, Any]()
    for answer in [api.rpc_async(owner, value_shapes, (mine,)) for owner, mine in there.items()]:
        found.update(answer.result())
    return [found[k] if k in found else shape_of(jnp.asarray(leaf)) for k, leaf in enumerate(leaves)]


@shown_as("the shapes of values")
def value_shapes(values: Mapping[int, Any]) -> dict[int, Any]:
    return {k: jax.tree.map(shape_of, floats(value)) for k, value in values.items()}


def fits(leaf: Any, like: Any) -> bool:
    """Return whether an array has the shape and, to JAX, the dtype of another one."""
    canonical = jax.dtypes.canonicalize_dtype
    return leaf.shape == like.shape and (leaf.dtype == like.dtype or canonical(leaf.dtype) == canonical(like.dtype))


def floats(value: Any) -> Any:
    """Return a value with None in place of what is not optimized."""
    return trees.map_leaves(lambda leaf: leaf if is_float_array(leaf) else None, value)


def difference(found: Any, known: Any) -> str | None:
    """Return the first difference in structure, shapes or dtypes, in words; None if there is none."""

    keystr, with_path = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
    theirs, ours = ({keystr(path): leaf for path, leaf in with_path(tree)} for tree in (found, known))
    shown: list[Any] = [jax.tree.structure(tree) for tree in (found, known)]
    other = f"the structure is {shown[0]}, expected {shown[1]}" if shown[0] != shown[1] else None
    return first_difference(theirs, ours, _fits, _kind) or other


def first_difference(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    fits: Callable[[Any, Any], bool],
    spelled: Callable[[Any], str],
) -> str | None:
    """Return the first difference between leaves, by path, in words; None if theirs fit."""
    for place, expected in ours.items():
        if place not in theirs:
            return f"{place} is missing, expected {spelled(expected)}"
        if not fits(theirs[place], expected):
            return f"{place} is {spelled(theirs[place])}, expected {spelled(expected)}"
    extra = next((place for place in theirs if place not in ours), None)
    return None if extra is None else f"{extra} is not expected; it is {spelled(theirs[extra])}"


def converted(found: Any, known: Any) -> Any:
    """Convert fitting values to the kinds of the known values, with the order of the known dicts, and copy arrays."""
    leaves = trees.leaves(found)
    return trees.map_leaves(lambda leaf: _at_home(next(leaves), leaf), known)


def _fits(found: Any, expected: Any) -> bool:
    """Return whether a leaf fits. Files return Python numbers as arrays without dimensions."""
    if type(expected) in NUMBERS and isinstance(found, ARRAYS):
        plain = isinstance(found.dtype, np.dtype) and found.ndim == 0
        return plain and np.can_cast(found.dtype, type(expected), "same_kind")
    return _kind(found) == _kind(expected)


def _kind(leaf: Any) -> str:
    return str(LeafSpec.of(leaf)) if isinstance(leaf, ARRAYS) else f"a {type(leaf).__name__}"


def _at_home(found: Any, known: Any) -> Any:
    if isinstance(known, jax.Array):  # a copy: one restored from a file may be committed to another worker's device
        spec = LeafSpec.of(found if isinstance(found, jax.Array) else known)  # NumPy knows of no weak types
        return spec.restored(np.array(plain(found)))
    if isinstance(known, np.ndarray):
        return np.array(found)
    return type(known)(found.item()) if type(known) in NUMBERS and isinstance(found, ARRAYS) else found
