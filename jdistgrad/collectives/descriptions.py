"""Descriptions of trees, which must be equal on all ranks: path, shape and dtype of each leaf, and static parts."""

import collections
import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistgrad.corrections import Elsewhere
from jdistgrad.errors import LeafError
from jdistgrad.leaves import LeafSpec, canonical, plain


class Leaf(NamedTuple):
    """A leaf at its path. ``sparse``: how many of its dimensions a BCOO array indexes; 0 if it is dense."""

    path: str
    spec: LeafSpec
    sparse: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self.spec.dtype

    def __str__(self) -> str:
        return f"sparse {self.spec} of {self.sparse} indices" if self.sparse else str(self.spec)


def is_sparse(value: Any) -> bool:
    """Return whether a value is a BCOO array, without the slow import of its module."""
    module = sys.modules.get("jax.experimental.sparse")
    return module is not None and isinstance(value, module.BCOO)


def index_dimensions(value: Any) -> int:
    return value.n_sparse if is_sparse(value) else 0


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and structure of a tree; a sparse array counts as one leaf."""
    return jax.tree.flatten(tree, is_leaf=is_sparse)


def describe(tree: Any, *, whole: bool = True) -> list[Leaf]:
    """Describe every leaf of a tree, in order. ``whole``: a sparse array counts as one leaf."""
    found, is_leaf = [], lambda value: is_elsewhere(value) or (whole and is_sparse(value))
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        refuse_elsewhere(path, leaf)
        name, value = _spelled(path), plain(leaf)
        try:
            spec = LeafSpec.of(value)
            spec = dataclasses.replace(spec, dtype=np.dtype(canonical(spec.dtype)), weak=False)
            found.append(Leaf(name, spec, index_dimensions(value)))
        except TypeError as error:
            text = f"{name} is a {type(leaf).__name__}, expected an array or a number"
            raise LeafError(text, path=name) from error
    return found


def refuse_sparse(tree: Any, what: str) -> None:
    """Raise LeafError for a sparse array, whose indices would be reduced as numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            raise LeafError(
                f"{what}: {_spelled(path)} is a sparse array, {type(leaf).__name__}{list(leaf.shape)}, which only "
                "DataParallel's averages support. Pass x.todense().",
                path=_spelled(path),
            )


def is_elsewhere(value: Any) -> bool:
    """Return whether a value is a reference, or the gradient of one, which JAX sees as a placeholder."""
    return isinstance(value, Elsewhere)


def refuse_elsewhere(path: Any, leaf: Any) -> None:
    """Raise LeafError for a value on another worker: ranks would reduce its placeholder."""
    if is_elsewhere(leaf):
        raise LeafError(
            f"{_spelled(path)} is {leaf}, expected an array or a number of this worker. Differentiate a reference by "
            "jd.value_and_grad, and pass DataParallel the gradients of arrays only; average gradients of this worker's "
            "own values in their context, dp.average_in(ctx, [reference]).",
            path=_spelled(path),
        )


def _spelled(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the whole)"


def require_inexact(leaves: Sequence[Leaf], what: str) -> None:
    for leaf in leaves:
        if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
            raise LeafError(
                f"{what}: the leaf {leaf.path} is {leaf}, expected a floating or complex dtype: integers have no "
                "gradient and no average. Keep them out of the tree (has_aux, optax.masked, for equinox modules "
                "eqx.partition(model, eqx.is_inexact_array)), or cast them.",
                path=leaf.path,
            )


# Static parts: the data of a tree's nodes, such as a module's dropout rate, and functions among the leaves, such as the
# activations of an equinox module. JAX compiles them into the program; gradients of different programs may have the
# same shapes.

CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, type(None))
PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, enum.Enum)  # whose repr is complete


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Enclosed:
    """A value, such as a function, as a node without leaves, so that it is part of the tree's structure."""

    value: Any


def has_functions(tree: Any) -> bool:
    return any(map(callable, jax.tree.leaves(tree)))


def enclosed(tree: Any) -> Any:
    """Enclose every function among the leaves of a tree."""
    return jax.tree.map(lambda leaf: Enclosed(leaf) if callable(leaf) else leaf, tree)


def opened(tree: Any) -> Any:
    """Undo ``enclosed``."""
    return _replaced(tree, lambda node: node.value)


def removed(tree: Any) -> Any:
    """Return a tree with None for every enclosed function: functions have no gradient."""
    return _replaced(tree, lambda node: None)


def _replaced(tree: Any, change: Callable[[Enclosed], Any]) -> Any:
    def replaced(node: Any) -> Any:
        return change(node) if isinstance(node, Enclosed) else node

    return jax.tree.map(replaced, tree, is_leaf=lambda node: isinstance(node, Enclosed))


def on_opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose arguments and results have enclosed functions."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = opened((args, kwargs))
        return enclosed(function(*args, **kwargs))

    return call


def static_parts(structure: Any) -> tuple[str, ...]:
    """Return texts of the static parts of a tree's structure, equal for equal parts in every process.

    Parts without such a text have that of their type. Keys are left out: paths of leaves have them.
    """
    if structure.node_data() is None:  # a leaf
        return ()
    kind, fixed = structure.node_data()
    found = [_spelled_part(fixed.value)] if kind is Enclosed else []
    if kind is not Enclosed and kind not in CONTAINERS:
        found = [f"{kind.__qualname__}: {_spelled_part(fixed)}"]
    for child in structure.children():
        found += static_parts(child)
    return tuple(found)


def _spelled_part(value: Any) -> str:
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, functools.partial):
        return f"partial{_spelled_part((value.func, value.args, value.keywords))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind: Any = type(value)
        fields = dataclasses.fields(value) if kind.__dataclass_params__.eq else ()  # else only its identity counts
        held = [getattr(value, one.name, None) for one in fields if one.compare]
        return type(value).__qualname__ + _spelled_part(held)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled_part, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_spelled_part(key)}: {_spelled_part(one)}' for key, one in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_spelled_part, value)))}}}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)  # of a function or a class
    return f"{getattr(value, '__module__', None)}.{name}" if isinstance(name, str) else type(value).__qualname__
