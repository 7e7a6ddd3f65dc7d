"""The assignment of gradients to buckets: a pure function of shapes, dtypes and an order.

The rule is that of PyTorch's Reducer, leaf by leaf: a bucket closes once it has reached its limit, so it may exceed the
limit by up to one leaf.
"""

import collections
import math
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
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be above zero, in MiB, or None for {CAP // MIB}; not {bucket_cap_mb!r}")
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
