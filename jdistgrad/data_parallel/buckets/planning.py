"""The assignment of gradients to buckets: a pure function of shapes, dtypes and an order.

The rule is that of PyTorch's Reducer, leaf by leaf: a bucket closes once it has reached its limit, so it may exceed the
limit by up to one leaf.
"""

import functools
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

MIB = 1 << 20
FIRST_LIMIT, CAP = 1 * MIB, 25 * MIB

Cap = float | None  # in MiB


def limits_of(bucket_cap_mb: Cap) -> tuple[int, ...]:
    """Return the bucket limits in bytes for a cap in MiB: by default 25, and 1 for the first."""
    if bucket_cap_mb is None:
        return FIRST_LIMIT, CAP
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, numbers.Real) or not bucket_cap_mb > 0:
        raise ValueError(
            f"bucket_cap_mb must be a number of MiB above zero or None for {CAP // MIB}; not {bucket_cap_mb!r}"
        )
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
        raise ValueError(f"plan_buckets: limits are numbers of bytes above zero, at least one; not {list(limits)}")
    walk = range(len(leaves)) if order is None else order
    if sorted(walk) != list(range(len(leaves))):
        raise ValueError(f"plan_buckets: order must name each of the {len(leaves)} leaves once; it is {list(walk)}")
    alone, walker = frozenset(sparse), _Walker(limits, large_alone=large_alone)
    for index in walk:
        leaf = leaves[index]
        if index in alone:
            walker.closed.append([index])
        else:
            walker.add(index, leaf.dtype, math.prod(leaf.shape) * _itemsize(leaf.dtype))
    buckets = walker.closed + list(walker.open.values())
    return sorted(buckets, key=min) if order is None else buckets


class _Walker:
    """The state of planning: the closed buckets, and one open bucket for each dtype."""

    def __init__(self, limits: Sequence[int], *, large_alone: bool):
        self.closed: list[list[int]] = []
        self._limits, self._large_alone = limits, large_alone
        self.open: dict[Any, list[int]] = {}
        self._bytes: dict[Any, int] = {}
        self._turn: dict[Any, int] = {}

    def add(self, index: int, key: Any, size: int) -> None:
        if self._large_alone and self.open.get(key) and size >= self._limit(key):
            self._close(key)
        self.open.setdefault(key, []).append(index)
        self._bytes[key] = self._bytes.get(key, 0) + size
        if self._bytes[key] >= self._limit(key):
            self._close(key)

    def _limit(self, key: Any) -> int:
        return self._limits[min(self._turn.get(key, 0), len(self._limits) - 1)]

    def _close(self, key: Any) -> None:
        self.closed.append(self.open.pop(key))
        self._bytes[key] = 0
        self._turn[key] = self._turn.get(key, 0) + 1


@functools.lru_cache
def _itemsize(dtype: Any) -> int:
    return np.dtype(dtype).itemsize
