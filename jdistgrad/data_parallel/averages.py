"""The average of one bucket: in place without a hook, through flat arrays with a hook, by rows if it is sparse.

The average of a gradient that nobody else has seen is written over the gradient. JAX arrays are immutable by contract,
so this is only for arrays fresh from a compiled function that nobody else holds.
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
from jdistgrad.data_parallel.buckets import CHUNK, Bucket, join_flat
from jdistgrad.errors import LeafError
from jdistgrad.leaves import LeafSpec
from jdistgrad.wire import pinned
from jdistgrad.wire.memory import BufferPool

HUGE_PAGE = 2 << 20  # bytes


def scratch() -> np.ndarray:
    """Return memory for a chunk, to be reused while it is warm: a fresh page costs more than the arithmetic on it."""
    memory = BufferPool().lease(CHUNK + HUGE_PAGE)  # in huge pages, which MPI copies several times as fast
    return memory[-memory.ctypes.data % HUGE_PAGE :][:CHUNK]


@functools.lru_cache(maxsize=256)
def host_device(sharding: Any) -> Any:
    """Return the CPU device of an array with this sharding; None if it is on an accelerator or on several devices."""
    devices = sharding.device_set
    only = next(iter(devices))
    return only if len(devices) == 1 and not pinned.is_far(only) else None


def average_in_chunks(
    bucket: Bucket,
    gradients: Sequence[jax.Array],
    divisor: float,
    all_: HostCollectives,
    scratch: np.ndarray,
    *,
    overwrite: bool,
) -> list[jax.Array]:
    """Average part by part, over the gradients or into new arrays. Arrays on accelerators go through host memory."""
    own = [np.asarray(gradient) for gradient in gradients]
    in_place = [overwrite and _is_view(view, g) for view, g in zip(own, gradients, strict=True)]
    into = [_writable(v) if here else np.empty(v.shape, v.dtype) for v, here in zip(own, in_place, strict=True)]
    sources, targets = ([view.reshape(-1) for view in views] for views in (own, into))
    divide_by = np.asarray(divisor, bucket.dtype)
    for size, parts in bucket.chunks:
        flat = scratch[: size * bucket.dtype.itemsize].view(bucket.dtype)
        for slot, mine, place in parts:
            np.divide(sources[slot][mine], divide_by, out=flat[place])
        all_.run("allreduce", flat, "sum")
        for slot, mine, place in parts:
            targets[slot][mine] = flat[place]
    where = [g.sharding if g.committed else None for g in gradients]  # uncommitted ones mix with any
    each = zip(gradients, into, where, in_place, strict=True)
    return [g if here else jax.device_put(LeafSpec.of(g).restored(v), there) for g, v, there, here in each]


def _is_view(view: np.ndarray, array: jax.Array) -> bool:
    """Return whether a NumPy array is a view of JAX's memory: not on accelerators, nor of dtypes that XLA packs."""
    if not view.size or not view.flags.c_contiguous or len(array.sharding.device_set) > 1:
        return False
    return view.ctypes.data == array.unsafe_buffer_pointer()


def _writable(view: np.ndarray) -> np.ndarray:
    memory = (ctypes.c_char * view.nbytes).from_address(view.ctypes.data)
    return np.frombuffer(memoryview(memory), view.dtype).reshape(view.shape)


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
    """Return the average of sparse gradients, such as an embedding's, of which only the rows are sent.

    Every rank gathers the rows of all ranks and sums those with equal indices; indices are unique and sorted.

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
