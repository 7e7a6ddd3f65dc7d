"""Gradients with few nonzero rows, such as an embedding's: these rows travel, not the table.

Every rank gathers the rows of all ranks and sums rows that several ranks have. The result is the dense table's average.
"""

import math
from typing import Any

import jax
import numpy as np

from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.errors import LeafError


def require_rows(path: str, gradient: Any) -> None:
    """Raise LeafError for a sparse array that is not a list of rows or elements."""
    if gradient.n_batch:
        raise LeafError(
            f"the sparse gradient {path} has {gradient.n_batch} batch dimensions; expected none. Use "
            "jax.experimental.sparse.bcoo_update_layout(gradient, n_batch=0).",
            path=path,
        )
    if not gradient.n_sparse:
        raise LeafError(f"the sparse gradient {path} has no index; expected rows. Use gradient.todense().", path=path)


def reduce_sparse(gradient: Any, shape: tuple[int, ...], dtype: Any, divisor: float, all_: HostCollectives) -> Any:
    """Return the average of sparse gradients, indices unique and sorted. ``gradient=None``: this rank has no rows."""
    mine = None if gradient is None else (np.asarray(gradient.data), np.asarray(gradient.indices))
    parts = [part for part in all_.gather_objects(mine) if part is not None]
    indices = np.concatenate([part[1] for part in parts])
    data = np.concatenate([part[0] for part in parts]) / np.asarray(divisor, dtype)
    inside = np.all(indices < np.array(shape[: indices.shape[1]]), axis=1)  # BCOO pads with indices outside the array
    places, where = np.unique(indices[inside], axis=0, return_inverse=True)
    total = np.zeros((len(places), *data.shape[1:]), dtype)
    np.add.at(total, where.reshape(-1), data[inside])
    from jax.experimental.sparse import BCOO  # slow, and seldom needed

    return BCOO((jax.numpy.asarray(total), jax.numpy.asarray(places)), shape=shape)


def reduce_rows(table: np.ndarray, shape: tuple[int, ...], divisor: float, all_: HostCollectives) -> None:
    """Average in place a dense table whose rows are mostly zero."""
    rows = table.reshape(shape[0], math.prod(shape[1:]))
    mine = np.flatnonzero(_bits(rows).any(axis=1))  # -0.0 is not zero: the others' rows would have another sign
    parts = all_.gather_objects((mine, rows[mine]))
    rows[mine] = 0
    for places, values in parts:
        rows[places] += values / np.asarray(divisor, table.dtype)


def _bits(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array's bits, as whole numbers."""
    return array.view(f"u{min(array.itemsize, 8)}")
