"""A tree taken apart for a checkpoint: what each leaf is, and the place by which it will be found again."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.errors import CheckpointError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc import trees
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.saving.marks import PerWorker, Sharded, Slice, with_slices

WHOLE = RRef, RemoteGradient, DistributedOptimizer, PerWorker, Sharded, Slice


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf at its place. ``own``: whether each worker has its own."""

    place: str
    value: Any
    own: bool

    @property
    def given(self) -> Any:
        """Return the leaf as it is in the tree."""
        return self.value.part if isinstance(self.value, Slice) else self.value


def leaves_of(tree: Any, place: str, rank: int, count: int, *, own: bool = False) -> Iterator[Leaf]:
    """Yield the leaves of a tree, below a place, with what the marks contain.

    ``rank``, ``count``: this worker's number among those that save together, and how many these are.
    """
    for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, WHOLE))[0]:
        where = place + jax.tree_util.keystr(path)
        if isinstance(value, PerWorker | Sharded):
            inside = _content(value, rank, count)
            yield from leaves_of(inside, where, rank, count, own=own or isinstance(value, PerWorker))
        else:
            yield Leaf(where, value, own or isinstance(value, Slice))


def require_different(places: Iterable[str]) -> None:
    """Raise CheckpointError if two leaves have the same place: a checkpoint would hold one of them."""
    seen = set[str]()
    for place in places:
        if place in seen:
            raise CheckpointError(
                f"two leaves have the same place, {place}: keys that are spelled alike (repr). Spell them apart."
            )
        seen.add(place)


def replaced(tree: Any, rank: int, count: int, found: Iterator[Any]) -> Any:
    """Return the tree without marks, and with other leaves, in the order of ``leaves_of``."""

    def change(node: Any) -> Any:
        if isinstance(node, PerWorker | Sharded):
            return replaced(_content(node, rank, count), rank, count, found)
        return None if node is None else next(found)

    return mapped(change, tree)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``change`` applied to each leaf, in JAX's order; dicts keep the order of their keys."""
    return trees.map_leaves(change, tree)


def _content(mark: PerWorker | Sharded, rank: int, count: int) -> Any:
    return mark.tree if isinstance(mark, PerWorker) else with_slices(mark, rank, count)
