"""The memory behind JAX arrays, written in place: a gradient nobody else has seen needs no second copy.

JAX arrays are immutable by contract, so this is only for arrays fresh from a compiled function that no one else holds.
"""

import ctypes
from typing import Any

import jax
import numpy as np


def on_host(array: jax.Array) -> bool:
    """Whether the array's memory is the host's, on one device."""
    return len(array.devices()) == 1 and next(iter(array.devices())).platform == "cpu"


def writable(array: jax.Array) -> np.ndarray:
    """A flat writable view of an array on the host, once it is computed."""
    array.block_until_ready()
    if array.size == 0:
        return np.empty(0, array.dtype)
    memory = (ctypes.c_char * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memoryview(memory), array.dtype)


class Scratch:
    """Memory that stays warm: a fresh page costs more than the arithmetic on it."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, size: int, dtype: Any) -> np.ndarray:
        """A flat array. It is valid until the next is taken."""
        needed = size * np.dtype(dtype).itemsize
        if self._bytes.size < needed:
            self._bytes = np.empty(needed, np.uint8)
        return self._bytes[:needed].view(dtype)
