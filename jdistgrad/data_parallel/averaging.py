"""How one bucket is averaged: in place without a hook, through flat arrays with one."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.hooks import base as hooks
from jdistgrad.data_parallel.layout import Bucket, join_flat
from jdistgrad.data_parallel.leaves import is_sparse
from jdistgrad.data_parallel.memory import Scratch, on_host, writable

CHUNK = 2 << 20  # bytes: a huge page, and what stays in a cache. 64 MiB take 10 ms that way, 15 to 20 in place


def plainly(
    bucket: Bucket, gradients: Sequence[jax.Array], divisor: float, all_: Collectives, scratch: Scratch
) -> list[jax.Array]:
    """Write averages where the gradients lie, part by part; those on a device are brought to the host and back."""
    views = [writable(g) if on_host(g) else np.array(g).reshape(-1) for g in gradients]
    divide_by = np.asarray(divisor, bucket.dtype)
    for start, stop in _chunks(bucket):
        parts, flat = list(_parts(bucket, views, start, stop)), scratch.take(stop - start, bucket.dtype)
        for part, place in parts:
            np.divide(part, divide_by, out=flat[place])
        all_.reduce_in_place(flat)
        for part, place in parts:
            np.copyto(part, flat[place])
    pairs = zip(gradients, views, strict=True)
    return [g if on_host(g) else jax.device_put(view.reshape(g.shape), g.sharding) for g, view in pairs]


def _chunks(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """A bucket's elements from beginning to end, so many at a time."""
    step = max(1, CHUNK // bucket.dtype.itemsize)
    return ((start, min(start + step, bucket.size)) for start in range(0, bucket.size, step))


def _parts(bucket: Bucket, views: Sequence[np.ndarray], start: int, stop: int) -> Iterator[tuple[np.ndarray, slice]]:
    """The parts of leaves that a chunk holds, each with its place in the chunk."""
    for slot, view in zip(bucket.slots, views, strict=True):
        first, last = max(slot.offset, start), min(slot.offset + slot.length, stop)
        if first < last:
            yield view[first - slot.offset : last - slot.offset], slice(first - start, last - start)


def zeros(bucket: Bucket, all_: Collectives, scratch: Scratch) -> None:
    """The part in ``plainly`` of a rank that has nothing to add."""
    for start, stop in _chunks(bucket):
        flat = scratch.take(stop - start, bucket.dtype)
        flat[:] = 0
        all_.reduce_in_place(flat)


def with_hook(
    hook: hooks.Hook, bucket: Bucket, gradients: Sequence[jax.Array], state: Any, divisor: float, all_: Collectives
) -> tuple[list[jax.Array], Any]:
    """Average through a hook; the gradients and its new state."""
    flat, state = hooks.reduce(hook, bucket.filled(flatten(list(gradients)), divisor), state, all_)
    return cut(flat, tuple(slot.shape for slot in bucket.slots)), state


flatten = jax.jit(join_flat)


@functools.partial(jax.jit, static_argnums=1)
def cut(flat: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """The arrays of these shapes that a flat one holds."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1].tolist()
    return [part.reshape(shape) for part, shape in zip(jnp.split(flat, ends), shapes, strict=True)]


def first_not_finite(gradients: Sequence[Any]) -> int:
    """One more than the place of the first gradient with NaN or infinity in it; 0: there is none."""
    values = [np.asarray(g.data if is_sparse(g) else g) for g in gradients]
    found = (k for k, x in enumerate(values, 1) if not np.isfinite(_wide(x)).all())
    return next(found, 0)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize <= 2 else x
