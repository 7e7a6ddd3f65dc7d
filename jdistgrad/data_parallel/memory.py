"""The memory behind JAX arrays, written in place: a gradient nobody else has seen needs no second copy.

JAX arrays are immutable by contract, so this is only for arrays fresh from a compiled function that no one else holds.
"""

import collections
import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.data_parallel.leaves import is_sparse
from jdistgrad.wire.buffers import BufferPool


@functools.lru_cache(maxsize=256)
def on_host(sharding: Any) -> bool:
    """Whether the memory of an array that lies so is the host's, on one device."""
    devices = sharding.device_set
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def writable(array: jax.Array) -> np.ndarray:
    """A flat writable view of an array on the host, once it is computed."""
    array.block_until_ready()
    if array.size == 0:
        return np.empty(0, array.dtype)
    memory = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memoryview(memory), array.dtype)


def own_copies(leaves: Sequence[Any]) -> list[Any]:
    """Copies that may be overwritten, made by one compiled function for each device. Sparse leaves stay themselves."""
    copied = list(leaves)
    places: dict[Any, list[int]] = collections.defaultdict(list)
    for place, leaf in enumerate(leaves):
        if not is_sparse(leaf):
            places[frozenset(leaf.devices()) if isinstance(leaf, jax.Array) else None].append(place)
    for some in places.values():
        for place, copy in zip(some, _copied([leaves[place] for place in some]), strict=True):
            copied[place] = copy
    return copied


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.numpy.copy(array) for array in arrays]


HUGE_PAGE = 2 << 20  # bytes


class Scratch:
    """Memory that stays warm: a fresh page costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._pool = BufferPool(idle_limit=0)  # in huge pages, which MPI copies several times as fast
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int, dtype: Any) -> np.ndarray:
        """A flat array. It is valid until the next is taken."""
        needed = size * np.dtype(dtype).itemsize
        if self._bytes.size < needed:
            memory = self._pool.lease(needed + HUGE_PAGE)
            self._bytes = memory[-memory.ctypes.data % HUGE_PAGE :][:needed]
        return self._bytes[:needed].view(dtype)
