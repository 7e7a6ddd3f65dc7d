"""Marks in a tree: what differs from worker to worker, and what is divided among the workers; regrouping of slices."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.data_parallel.collectives import Collectives
from jdistgrad.errors import CheckpointError
from jdistgrad.optim.sharding import on_parameters


@dataclasses.dataclass(frozen=True)
class PerWorker:
    """A tree of which each worker has its own."""

    tree: Any


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An optimizer state of which each worker has its slices."""

    tx: optax.GradientTransformation
    state: Any
    params: Any
    collectives: Collectives | None


@dataclasses.dataclass(frozen=True)
class Slice:
    """One worker's part of a flattened array.

    Attributes:
      rank, count: its place in the group that divides the array, and how many these are.
      group: the world ranks of the group; None: all workers that save together.
    """

    part: Any
    shape: tuple[int, ...]
    rank: int
    count: int
    group: tuple[int, ...] | None = None


def per_worker(tree: Any) -> Any:
    """Mark a tree of which each worker has its own, for ``save`` and ``restore``: random keys, a position in the data.

    On another number of workers, each gets the tree that the worker of its number had; a worker that has none there
    keeps the one that it gives.

    Example:
      >>> jd.save(folder, 100, (params, jd.per_worker(dropout_key)))
    """
    return PerWorker(tree)


def sharded(tx: optax.GradientTransformation, state: Any, params: Any, collectives: Collectives | None = None) -> Any:
    """Mark an optimizer state of ``shard_state``, for ``save`` and ``restore``: each worker saves its slices.

    On another number of workers the slices are cut anew.

    Arguments:
      tx: the optimizer that was given to ``shard_state``.
      state: this worker's part.
      params: the parameters.
      collectives: those that were given to ``shard_state``; default all workers that save together.

    Example:
      >>> state = jd.shard_state(optax.adam(1e-3)).init(params)
      >>> jd.save(folder, 100, (params, jd.sharded(optax.adam(1e-3), state, params)))
    """
    return Sharded(tx, state, params, collectives)


def with_slices(mark: Sharded, rank: int, count: int) -> Any:
    """Return the marked state with a ``Slice`` in place of each array that is divided."""
    group = None
    if mark.collectives is not None:
        rank, count, group = mark.collectives.rank, mark.collectives.size, mark.collectives.world_ranks

    def slice_of(part: Any, like: Any) -> Slice:
        shape = jnp.shape(like)
        if jnp.shape(part) != (length := slice_length(shape, count),):
            raise CheckpointError(
                f"jd.sharded: a part has the shape {list(jnp.shape(part))}, expected [{length}], a slice of "
                f"{list(shape)} for {count} workers. It takes this worker's state of jd.shard_state, the parameters, "
                "and the collectives that shard_state was given."
            )
        return Slice(part, shape, rank, count, group)

    return on_parameters(mark.tx, slice_of, mark.state, mark.params)


def slice_length(shape: Sequence[int], count: int) -> int:
    return -(-math.prod(shape) // count)


def overlapping(shape: Sequence[int], rank: int, count: int, before: int) -> range:
    """Return the ranks, of as many as there were before, whose slices the new slice of a rank is made of."""
    new, old = slice_length(shape, count), slice_length(shape, before)
    first, last = rank * new, min((rank + 1) * new, math.prod(shape))
    return range(first // old, -(-last // old)) if last > first else range(0)


def regrouped(parts: Mapping[int, np.ndarray], one: Slice, before: int, dtype: Any) -> np.ndarray:
    """Return the new slice of a rank, made of the old slices of some ranks."""
    new, old, whole = slice_length(one.shape, one.count), slice_length(one.shape, before), math.prod(one.shape)
    found, first = np.zeros(new, dtype), one.rank * new
    for rank, part in parts.items():
        low, high = max(first, rank * old), min(first + new, (rank + 1) * old, whole)
        if high > low:
            found[low - first : high - first] = part[low - rank * old : high - rank * old]
    return found
