"""The average of one bucket: in place without a hook, through flat arrays with a hook, by rows if it is sparse.

A gradient that nobody else has seen needs no second copy: its average is written to its memory. JAX arrays are
immutable by contract, so this is only for arrays fresh from a compiled function that nobody else holds.
"""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.descriptions import is_sparse
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.data_parallel import hooks
from jdistgrad.data_parallel.buckets import Bucket, join_flat
from jdistgrad.errors import LeafError
from jdistgrad.wire import pinned
from jdistgrad.wire.memory import BufferPool

HUGE_PAGE = 2 << 20  # bytes


class Scratch:
    """Memory that is reused to stay warm: a fresh page costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._pool = BufferPool(idle_limit=0)  # in huge pages, which MPI copies several times as fast
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int, dtype: Any) -> np.ndarray:
        """Return a flat array, valid until the next call."""
        needed = size * np.dtype(dtype).itemsize
        if self._bytes.size < needed:
            memory = self._pool.lease(needed + HUGE_PAGE)
            self._bytes = memory[-memory.ctypes.data % HUGE_PAGE :][:needed]
        return self._bytes[:needed].view(dtype)


@functools.lru_cache(maxsize=256)
def host_device(sharding: Any) -> Any:
    """Return the CPU device of an array with this sharding; None if the array is elsewhere or on several devices."""
    devices = sharding.device_set
    only = next(iter(devices))
    return only if len(devices) == 1 and not pinned.is_far(only) else None


def writable(array: jax.Array, like: np.ndarray) -> np.ndarray:
    """Return a writable flat view of a finished array in host memory.

    Arguments:
      like: its NumPy view, whose size costs less to ask for than the array's.
    """
    if like.size == 0:
        return like
    memory = (ctypes.c_char * like.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memoryview(memory), like.dtype)


def empty_like(like: Sequence[jax.Array], devices: Sequence[Any]) -> list[jax.Array]:
    """Return new arrays to write to, with the shapes, dtypes and devices of given arrays.

    Arguments:
      devices: each array's CPU device. An array whose device is None is returned itself: nobody writes to it.
    """
    if None not in devices and len(set(devices)) == 1:
        return jax.block_until_ready(_zeros(list(like)))
    each = zip(like, devices, strict=True)
    return [array if device is None else empty_like([array], [device])[0] for array, device in each]


@functools.partial(jax.jit, keep_unused=True)  # the unused arguments determine the device
def _zeros(like: list[jax.Array]) -> list[jax.Array]:
    return [jax.numpy.zeros_like(array) for array in like]


def average_in_chunks(
    bucket: Bucket,
    gradients: Sequence[jax.Array],
    divisor: float,
    all_: HostCollectives,
    scratch: Scratch,
    *,
    overwrite: bool,
) -> list[jax.Array]:
    """Average part by part, over the gradients or into new arrays. Arrays on accelerators go through host memory."""
    seen = [np.asarray(g) for g in gradients]
    whole = jnp.finfo(bucket.dtype).bits >= 8  # XLA packs several smaller numbers into a byte
    here = [
        _place(g, v, overwrite=overwrite) if whole and v.flags.c_contiguous else None
        for g, v in zip(gradients, seen, strict=True)
    ]
    own = [view.reshape(-1) for view in seen]
    results = gradients if overwrite else empty_like(gradients, here)
    into = [writable(r, v) if place else np.empty_like(v) for r, v, place in zip(results, own, here, strict=True)]
    divide_by = np.asarray(divisor, bucket.dtype)
    for size, parts in bucket.chunks:
        flat = scratch.take(size, bucket.dtype)
        for slot, mine, place in parts:
            np.divide(own[slot][mine], divide_by, out=flat[place])
        all_.run("allreduce", flat, "sum")
        for slot, mine, place in parts:
            into[slot][mine] = flat[place]
    each = zip(results, into, here, strict=True)
    return [r if place else jax.device_put(view.reshape(r.shape), r.sharding) for r, view, place in each]


def _place(gradient: jax.Array, view: np.ndarray, *, overwrite: bool) -> Any:
    """Return the device of a gradient whose average can be written to JAX's memory; None: to NumPy's."""
    found = host_device(gradient.sharding)
    if found is not None or not overwrite:
        return found
    is_own = gradient.sharding.memory_kind == pinned.PINNED and view.ctypes.data == gradient.unsafe_buffer_pointer()
    return next(iter(gradient.sharding.device_set)) if is_own else None


def zeros(bucket: Bucket, all_: HostCollectives, scratch: Scratch) -> None:
    """Take part in ``average_in_chunks`` with zeros: this rank has no gradients."""
    for size, _ in bucket.chunks:
        flat = scratch.take(size, bucket.dtype)
        flat[:] = 0
        all_.run("allreduce", flat, "sum")


def with_hook(
    hook: hooks.Hook, bucket: Bucket, gradients: Sequence[jax.Array], state: Any, divisor: float, all_: HostCollectives
) -> tuple[list[jax.Array], Any]:
    shown = dataclasses.replace(bucket, flat=flatten(list(gradients)), divisor=divisor)
    flat, state = hooks.reduce(hook, shown, state, all_)
    averaged = cut(flat, tuple(slot.shape for slot in bucket.slots))
    each = zip(averaged, gradients, strict=True)
    return [a if a.sharding == g.sharding else jax.device_put(a, g.sharding) for a, g in each], state


flatten = jax.jit(join_flat)


@functools.partial(jax.jit, static_argnums=1)
def cut(flat: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1].tolist()
    return [part.reshape(shape) for part, shape in zip(jnp.split(flat, ends), shapes, strict=True)]


def first_not_finite(gradients: Sequence[Any]) -> int:
    """Return 1 plus the place of the first gradient that holds NaN or infinity; 0 if all are finite."""
    for k, gradient in enumerate(gradients, 1):
        x = np.asarray(gradient.data if is_sparse(gradient) else gradient)
        if not np.isfinite(x.astype(np.float32) if x.dtype.itemsize <= 2 else x).all():
            return k
    return 0


def require_rows(path: str, gradient: Any) -> None:
    if gradient.n_batch or not gradient.n_sparse:
        raise LeafError(
            f"the sparse gradient {path} has {gradient.n_batch} batch dimensions and {gradient.n_sparse} that are "
            "indexed; expected none, and at least one. Use gradient.todense(), or "
            "jax.experimental.sparse.bcoo_update_layout(gradient, n_batch=0).",
            path=path,
        )


def reduce_sparse(gradient: Any, shape: tuple[int, ...], dtype: Any, divisor: float, all_: HostCollectives) -> Any:
    """Return the average of sparse gradients, such as an embedding's: their rows travel, not the table.

    Every rank gathers the rows of all ranks and sums rows that several ranks have; indices are unique and sorted.

    Arguments:
      gradient: None if this rank has no rows.
    """
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
    bits = rows.view(f"u{min(rows.itemsize, 8)}")
    mine = np.flatnonzero(bits.any(axis=1))  # -0.0 is not zero: the others' rows would have another sign
    parts = all_.gather_objects((mine, rows[mine]))
    rows[mine] = 0
    for places, values in parts:
        rows[places] += values / np.asarray(divisor, table.dtype)
