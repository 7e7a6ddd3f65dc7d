"""Conversion of leaves of any kind to host memory, and back."""

import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import LeafError
from jdistgrad.leaves import LeafSpec, is_key, plain
from jdistgrad.rpc.traced_hook import staging
from jdistgrad.wire.memory import BufferPool

WARM_FROM = 1 << 20  # bytes
NUMBERS = (bool, int, float, complex)
_warm, _leasing = BufferPool(idle_limit=1 << 28), threading.Lock()


def refuse_keys(leaf: Any) -> None:
    if is_key(leaf):
        raise LeafError(
            f"{leaf.dtype}{list(leaf.shape)} are random keys, expected numbers. Pass jax.random.key_data(keys), and "
            "apply jax.random.wrap_key_data to the result. DataParallel.broadcast takes keys as they are."
        )


def on_numbers(function: Callable[..., Any], leaf: Any, *args: Any) -> Any:
    """Apply a function of arrays to a leaf that may be a random key."""
    if is_key(leaf):
        return LeafSpec.of(leaf).restored(function(plain(leaf), *args))
    return function(leaf, *args)


def to_host(leaf: Any) -> np.ndarray:
    """Return a writable contiguous copy of a leaf. Python numbers get JAX's dtype for them, arrays keep theirs.

    Raises:
      OverflowError: an integer does not fit into that dtype.
    """
    value = plain(leaf)
    if isinstance(value, jax.Array | np.ndarray):
        return copied(value)
    memory = np.array(jax.numpy.asarray(value))
    if memory.dtype.kind in "iu" and memory != value:
        raise OverflowError(f"{value!r} does not fit into {memory.dtype}: use jax_enable_x64, or an array of NumPy's")
    return memory


def to_jax(leaf: Any) -> jax.Array:
    """Return a leaf as a JAX array.

    Raises:
      OverflowError: an integer does not fit into JAX's dtype. JAX itself raises for Python's, and wraps NumPy's around.
      LeafError: the leaf holds random keys.
    """
    refuse_keys(leaf)
    array = jax.numpy.asarray(leaf)
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu" and leaf.dtype != array.dtype:
        held = np.iinfo(array.dtype)
        for extreme in (int(leaf.min(initial=0)), int(leaf.max(initial=0))):
            if not held.min <= extreme <= held.max:
                raise OverflowError(f"{extreme} does not fit into {array.dtype}: use jax_enable_x64, or floats")
    return array


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return new memory; large memory is reused, since fresh pages cost more than a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes < WARM_FROM:
        return np.empty(shape, dtype)
    with _leasing:
        return _warm.lease(nbytes).view(dtype).reshape(shape)


def copied(x: Any) -> np.ndarray:
    seen = np.asarray(x)
    memory = empty(seen.shape, seen.dtype)
    memory[...] = seen
    return memory


def like(memory: np.ndarray, leaf: Any) -> Any:
    """Return memory as a value like a leaf: a number, or an array of its dtype and sharding, which owns the memory."""
    if type(leaf) in NUMBERS:
        return type(leaf)(memory.item())
    if is_key(leaf):
        return LeafSpec.of(leaf).restored(jax.numpy.asarray(memory))
    own = memory.astype(leaf.dtype, copy=False)
    if isinstance(leaf, jax.Array):
        return jax.device_put(own, leaf.sharding if leaf.committed else None, may_alias=True)
    return own if isinstance(leaf, np.ndarray) else jax.numpy.asarray(own)


def any_traced(tree: Any) -> bool:
    if trace_state_clean():
        return False
    return staging() or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
