"""Buckets as the reduction and the hooks see them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.data_parallel.leaves import Leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where a leaf lies in its bucket: ``length`` elements from ``offset``."""

    index: int
    path: str
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket.

    A hook gets it with ``flat``, the gradients of this rank one after the other, and ``divisor``, how many ranks the
    sum is to be divided by.
    """

    index: int
    dtype: np.dtype
    slots: tuple[Slot, ...]
    last: bool
    sparse: bool = False
    flat: Any = None
    divisor: Any = None

    @property
    def size(self) -> int:
        """How many elements it holds."""
        return sum(slot.length for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def views(self, flat: Any = None) -> list[Any]:
        """The leaves cut out of a flat array of this layout (default: ``flat``), in their shapes."""
        whole = self.flat if flat is None else flat
        return [whole[slot.offset : slot.offset + slot.length].reshape(slot.shape) for slot in self.slots]

    def filled(self, flat: Any, divisor: Any) -> "Bucket":
        return dataclasses.replace(self, flat=flat, divisor=divisor)


def lay_out(
    leaves: Sequence[Leaf], plan: Sequence[Sequence[int]], sparse: frozenset[int] = frozenset()
) -> list[Bucket]:
    """The buckets of a plan."""
    return [
        Bucket(k, leaves[indices[0]].dtype, _slots(leaves, indices), k == len(plan) - 1, indices[0] in sparse)
        for k, indices in enumerate(plan)
    ]


def _slots(leaves: Sequence[Leaf], indices: Sequence[int]) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for index in indices:
        leaf = leaves[index]
        length = math.prod(leaf.shape)
        slots.append(Slot(index, leaf.path, offset, length, leaf.shape))
        offset += length
    return tuple(slots)


def join_flat(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays one after the other."""
    flat = [array.reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else jax.numpy.concatenate(flat)
