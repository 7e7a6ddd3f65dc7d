"""Flatten trees for checkpoints, in which leaves are found by their paths; mark trees that differ between workers."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.collectives.base import Collectives
from jdistgrad.errors import CheckpointError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.optim.optax_extras import on_parameters
from jdistgrad.rpc import trees
from jdistgrad.rpc.rref import RRef


@dataclasses.dataclass(frozen=True)
class per_worker:  # noqa: N801 used like a function
    """Mark a tree of which each worker has its own, for ``save`` and ``restore``: random keys, a position in the data.

    On another number of workers, each gets the tree that the worker of its number had; a worker that has none there
    keeps the one that it gives.

    Example:
      >>> jd.save(folder, 100, (params, jd.per_worker(dropout_key)))
    """

    tree: Any


@dataclasses.dataclass(frozen=True)
class sharded:  # noqa: N801 used like a function
    """Mark an optimizer state of ``shard_state``, for ``save`` and ``restore``: each worker saves its slices.

    Another number of workers gets slices of another size.

    Arguments:
      tx: the optimizer that was given to ``shard_state``.
      state: this worker's part.
      params: the parameters.
      collectives: those that were given to ``shard_state``; default all workers that save together.

    Example:
      >>> state = jd.shard_state(optax.adam(1e-3)).init(params)
      >>> jd.save(folder, 100, (params, jd.sharded(optax.adam(1e-3), state, params)))
    """

    tx: optax.GradientTransformation
    state: Any
    params: Any
    collectives: Collectives | None = None


@dataclasses.dataclass(frozen=True)
class Slice:
    """One worker's part of a flattened array.

    Attributes:
      rank, count: this worker's rank in the group that divides the array, and the group's size.
      group: the world ranks of the group; None: all callers, whose ranks ``among`` sets.
    """

    part: Any
    shape: tuple[int, ...]
    rank: int
    count: int
    group: tuple[int, ...] | None = None

    def among(self, callers: Sequence[int], rank: int) -> "Slice":
        """Set rank and count by the callers, if they are the group. Raises CheckpointError for a wrong shape."""
        mine = self
        if self.group is None:
            mine = dataclasses.replace(self, rank=callers.index(rank), count=len(callers))
        if jnp.shape(self.part) != (length := -(-math.prod(self.shape) // mine.count),):
            raise CheckpointError(
                f"jd.sharded: a part has the shape {list(jnp.shape(self.part))}, expected [{length}], a slice of "
                f"{list(self.shape)} for {mine.count} workers. Pass this worker's state of jd.shard_state, the "
                "parameters, and the collectives that shard_state was given."
            )
        return mine


WHOLE = RRef, RemoteGradient, DistributedOptimizer, per_worker, sharded, Slice


@dataclasses.dataclass(frozen=True)
class PlacedLeaf:
    """A leaf and its path. ``own``: whether each worker has its own."""

    place: str
    value: Any
    own: bool

    @property
    def is_owned(self) -> bool:
        """Whether owners write the leaf, instead of the caller."""
        return isinstance(self.value, RRef | DistributedOptimizer)

    @property
    def given(self) -> Any:
        """The leaf without marks."""
        return self.value.part if isinstance(self.value, Slice) else self.value


def leaves_of(tree: Any, place: str, *, own: bool = False) -> Iterator[PlacedLeaf]:
    """Yield the leaves of a tree, with those inside marks."""
    for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, WHOLE))[0]:
        where = place + jax.tree_util.keystr(path)
        if isinstance(value, per_worker | sharded):
            yield from leaves_of(_content(value), where, own=own or isinstance(value, per_worker))
        else:
            yield PlacedLeaf(where, value, own or isinstance(value, Slice))


def replaced(tree: Any, found: Iterator[Any]) -> Any:
    """Return the tree without marks and with new leaves, in the order of ``leaves_of``."""

    def change(node: Any) -> Any:
        if isinstance(node, per_worker | sharded):
            return replaced(_content(node), found)
        return None if node is None else next(found)

    return trees.map_leaves(change, tree)


def _content(mark: per_worker | sharded) -> Any:
    """Return the tree in a mark, with a ``Slice`` for each array that is divided."""
    if isinstance(mark, per_worker):
        return mark.tree
    ours, rank, count, group = mark.collectives, 0, 0, None
    if ours is not None:
        rank, count, group = ours.rank, ours.size, ours.world_ranks
    return on_parameters(
        mark.tx, lambda part, like: Slice(part, jnp.shape(like), rank, count, group), mark.state, mark.params
    )


def require_different(places: Iterable[str]) -> None:
    """Raise CheckpointError if two leaves have the same path: a checkpoint would hold one of them."""
    seen = set[str]()
    for place in places:
        if place in seen:
            raise CheckpointError(f"two leaves have the same path, {place}, since their keys have the same repr")
        seen.add(place)
