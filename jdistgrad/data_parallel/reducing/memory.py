"""In-place writes to the memory of JAX arrays: a gradient that nobody else has seen needs no second copy.

JAX arrays are immutable by contract, so this is only for arrays fresh from a compiled function that nobody else holds.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.wire import pinned
from jdistgrad.wire.memory import BufferPool


@functools.lru_cache(maxsize=256)
def host_device(sharding: Any) -> Any:
    """Return the CPU device of an array with this sharding; None if the array is elsewhere or on several devices."""
    devices = sharding.device_set
    only = next(iter(devices))
    return only if len(devices) == 1 and not pinned.is_far(only) else None


def device_if_pinned(array: jax.Array, view: np.ndarray) -> Any:
    """Return the device of an array whose NumPy view is its own memory, pinned and as it lies; else None."""
    if array.sharding.memory_kind != pinned.PINNED or view.ctypes.data != array.unsafe_buffer_pointer():
        return None
    return next(iter(array.sharding.device_set))


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
