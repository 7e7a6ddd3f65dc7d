"""Buckets of gradients: their assignment, and their layout for the reduction and hooks.

Gradients are assigned to buckets by a pure function of shapes, dtypes and an order. The rule is that of PyTorch's
Reducer, leaf by leaf: a bucket closes once it has reached its limit, so it may exceed the limit by up to one leaf.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.descriptions import Leaf

CHUNK = 2 << 20  # bytes: a huge page. Averaging 64 MiB takes 10 ms in chunks; in place it took 15 to 20 ms


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A leaf in its bucket: ``length`` elements from ``offset``."""

    index: int
    path: str
    offset: int
    length: int
    shape: tuple[int, ...]


Part = tuple[int, slice, slice]  # a slot of a bucket, a slice of its leaf, and the place of that in a chunk


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Leaves of one dtype that are reduced together.

    A hook gets the bucket with ``flat``, this rank's gradients one after the other, and ``divisor``, the number that
    the sum over ranks must be divided by.
    """

    index: int
    dtype: np.dtype
    slots: tuple[Slot, ...]
    last: bool
    sparse: bool = False
    flat: Any = None
    divisor: Any = None

    @functools.cached_property
    def size(self) -> int:
        """The number of elements."""
        return sum(slot.length for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @functools.cached_property
    def chunks(self) -> list[tuple[int, list[Part]]]:
        """The bucket in consecutive chunks, by size and parts, each small enough to stay in a core's cache."""
        step, size = max(1, CHUNK // self.dtype.itemsize), self.size
        chunks: list[tuple[int, list[Part]]] = [(min(step, size - start), []) for start in range(0, size, step)]
        for place, slot in enumerate(self.slots):
            end = slot.offset + slot.length
            for number in range(slot.offset // step, -(-end // step)):
                first, last = max(slot.offset, number * step), min(end, (number + 1) * step)
                own = slice(first - slot.offset, last - slot.offset)
                if first < last:
                    chunks[number][1].append((place, own, slice(first - number * step, last - number * step)))
        return chunks

    def views(self, flat: Any = None) -> list[Any]:
        """Cut the leaves, in their shapes, out of a flat array of this layout (default: ``flat``)."""
        whole = self.flat if flat is None else flat
        return [whole[slot.offset : slot.offset + slot.length].reshape(slot.shape) for slot in self.slots]


def lay_out(
    leaves: Sequence[Leaf], plan: Sequence[Sequence[int]], sparse: frozenset[int] = frozenset()
) -> list[Bucket]:
    buckets = []
    for k, indices in enumerate(plan):
        slots, offset = [], 0
        for index in indices:
            leaf = leaves[index]
            length = math.prod(leaf.shape)
            slots.append(Slot(index, leaf.path, offset, length, leaf.shape))
            offset += length
        dtype, is_last = leaves[indices[0]].dtype, k == len(plan) - 1
        buckets.append(Bucket(k, dtype, tuple(slots), is_last, indices[0] in sparse))
    return buckets


def join_flat(arrays: Sequence[jax.Array]) -> jax.Array:
    flat = [array.reshape(-1) for array in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


# Planning.

MIB = 1 << 20
FIRST_LIMIT, CAP = 1 * MIB, 25 * MIB

Cap = float | None  # in MiB


def limits_of(bucket_cap_mb: Cap) -> tuple[int, ...]:
    """Return the bucket limits in bytes for a cap in MiB: by default 25, and 1 for the first."""
    if bucket_cap_mb is None:
        return FIRST_LIMIT, CAP
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive (MiB), or None for {CAP // MIB}; not {bucket_cap_mb!r}")
    return (max(1, int(min(float(bucket_cap_mb), 1 << 40) * MIB)),)


def plan_buckets(
    leaves: Sequence[Any],
    limits: Sequence[int],
    *,
    sparse: Iterable[int] = (),
    order: Sequence[int] | None = None,
    large_alone: bool = False,
) -> list[list[int]]:
    """Plan the buckets that gradients are reduced in.

    Arguments:
      leaves: arrays, or anything with a ``shape`` and a ``dtype``.
      limits: bytes after which a dtype's buckets close: the first limit for the dtype's first bucket, and so on; the
        last limit for all further buckets.
      sparse: indices of leaves that get a bucket each.
      order: all indices, each once, in the order to assign them. By default the order of ``leaves``, with the buckets
        sorted by their smallest index.
      large_alone: give a leaf that reaches the limit by itself its own bucket, which then needs no copy.

    Returns:
      The leaf indices of each bucket. No bucket mixes dtypes.

    Example:
      >>> plan_buckets([jnp.zeros(50)] * 4, [400])
      [[0, 1], [2, 3]]
    """
    if not limits or any(not limit > 0 for limit in limits):
        raise ValueError(f"plan_buckets: limits must be one or more positive numbers of bytes, not {list(limits)}")
    walk = range(len(leaves)) if order is None else order
    if sorted(walk) != list(range(len(leaves))):
        raise ValueError(f"plan_buckets: order must name each of the {len(leaves)} leaves once; it is {list(walk)}")
    alone, closed = frozenset(sparse), list[list[int]]()
    begun: dict[Any, list[int]] = {}  # the open bucket of each dtype, its bytes, and how many were closed before
    nbytes, turns = collections.Counter[Any](), collections.Counter[Any]()

    def close(dtype: Any) -> None:
        closed.append(begun.pop(dtype))
        nbytes[dtype] = 0
        turns[dtype] += 1

    for index in walk:
        dtype, shape = leaves[index].dtype, leaves[index].shape
        if index in alone:
            closed.append([index])
            continue
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if large_alone and dtype in begun and size >= limits[min(turns[dtype], len(limits) - 1)]:
            close(dtype)
        begun.setdefault(dtype, []).append(index)
        nbytes[dtype] += size
        if nbytes[dtype] >= limits[min(turns[dtype], len(limits) - 1)]:
            close(dtype)
    buckets = closed + list(begun.values())
    return sorted(buckets, key=min) if order is None else buckets
