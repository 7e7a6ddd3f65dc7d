"""What the ranks must agree on about a tree of gradients: path, shape and dtype of each leaf."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.sparse import BCOO

from jdistgrad.errors import LeafError


class Leaf(NamedTuple):
    """One leaf, described."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sparse: bool = False

    def __str__(self) -> str:
        return f"{'sparse ' if self.sparse else ''}{self.dtype}{list(self.shape)}"


def is_sparse(value: Any) -> bool:
    return isinstance(value, BCOO)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; a sparse array counts as one leaf."""
    return jax.tree.flatten(tree, is_leaf=is_sparse)


def describe(tree: Any) -> list[Leaf]:
    """Every leaf of a tree, in its order."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_sparse)[0]
    return [
        Leaf(
            jax.tree_util.keystr(path) or "(the whole)",
            tuple(x.shape if hasattr(x, "shape") else np.shape(x)),
            dtype_of(x),
            is_sparse(x),
        )
        for path, x in found
    ]


def dtype_of(value: Any) -> np.dtype:
    """The type an array has as a JAX array."""
    dtype = np.dtype(getattr(value, "dtype", None) or jax.dtypes.result_type(value))
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def require_inexact(leaves: Sequence[Leaf], what: str) -> None:
    """Raises LeafError for the first leaf that has no average."""
    for leaf in leaves:
        if not jax.numpy.issubdtype(leaf.dtype, np.inexact):
            raise LeafError(
                f"{what}: the leaf {leaf.path} is {leaf}, expected a floating or complex dtype: integers have no "
                "gradient and no average. Keep them out of the tree (has_aux, optax.masked), or cast them.",
                path=leaf.path,
            )
