"""The average of one bucket: in place without a hook, through flat arrays with a hook."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel.buckets.bucket import Bucket, join_flat
from jdistgrad.data_parallel.buckets.leaves import is_sparse
from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.data_parallel.hooks import base as hooks
from jdistgrad.data_parallel.reducing.memory import Scratch, device_if_pinned, empty_like, host_device, writable


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
    _average_parts(bucket, own, into, divisor, all_, scratch)
    each = zip(results, into, here, strict=True)
    return [r if place else jax.device_put(view.reshape(r.shape), r.sharding) for r, view, place in each]


def _place(gradient: jax.Array, view: np.ndarray, *, overwrite: bool) -> Any:
    """Return the device of a gradient whose average can be written to JAX's memory; None: to NumPy's."""
    found = host_device(gradient.sharding)
    return device_if_pinned(gradient, view) if found is None and overwrite else found


def _average_parts(
    bucket: Bucket,
    own: list[np.ndarray],
    into: list[np.ndarray],
    divisor: float,
    all_: HostCollectives,
    scratch: Scratch,
) -> None:
    divide_by = np.asarray(divisor, bucket.dtype)
    for size, parts in bucket.chunks:
        flat = scratch.take(size, bucket.dtype)
        for slot, mine, place in parts:
            np.divide(own[slot][mine], divide_by, out=flat[place])
        all_.reduce_in_place(flat)
        for slot, mine, place in parts:
            into[slot][mine] = flat[place]


def zeros(bucket: Bucket, all_: HostCollectives, scratch: Scratch) -> None:
    """Take part in ``average_in_chunks`` with zeros: this rank has no gradients."""
    for size, _ in bucket.chunks:
        flat = scratch.take(size, bucket.dtype)
        flat[:] = 0
        all_.reduce_in_place(flat)


def with_hook(
    hook: hooks.Hook, bucket: Bucket, gradients: Sequence[jax.Array], state: Any, divisor: float, all_: HostCollectives
) -> tuple[list[jax.Array], Any]:
    """Average through a hook; return the averages and the hook's new state."""
    flat, state = hooks.reduce(hook, bucket.filled(flatten(list(gradients)), divisor), state, all_)
    averaged = cut(flat, tuple(slot.shape for slot in bucket.slots))
    each = zip(averaged, gradients, strict=True)
    return [a if a.sharding == g.sharding else jax.device_put(a, g.sharding) for a, g in each], state


flatten = jax.jit(join_flat)


@functools.partial(jax.jit, static_argnums=1)
def cut(flat: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """Cut a flat array into arrays of these shapes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1].tolist()
    return [part.reshape(shape) for part, shape in zip(jnp.split(flat, ends), shapes, strict=True)]


def first_not_finite(gradients: Sequence[Any]) -> int:
    """Return 1 plus the place of the first gradient that holds NaN or infinity; 0 if all are finite."""
    values = [np.asarray(g.data if is_sparse(g) else g) for g in gradients]
    found = (k for k, x in enumerate(values, 1) if not np.isfinite(_wide(x)).all())
    return next(found, 0)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize <= 2 else x
