"""Arrays for compiled code on the other side, sent as NumPy arrays because making JAX arrays would take longer.

Small arrays travel as one block of bytes. A note describes their places in the block; it is the same in every run, so
it is decoded only once.
"""

import functools
import math
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.wire.arrays import ALIAS_FROM, bytes_of, check_kept, dtype_name, named_dtype, padded, padding

Kinds = tuple[tuple[np.dtype, tuple[int, ...]], ...]


class ArrayBlock(list[Any]):
    """A list of arrays that arrive as NumPy arrays.

    A list with a random key, a weakly typed scalar or an array spread over processes travels as an ordinary list.
    """

    def __reduce__(self) -> Any:
        hosts = _hosts(self)
        if hosts is None:
            return list, (tuple(self),)
        note = _note(tuple([(one.dtype, one.shape) for one in hosts]))
        block = b"".join([one.tobytes() + padding(one.nbytes) for one in hosts if one.nbytes < ALIAS_FROM])
        return arrived, (note, block, [pickle.PickleBuffer(bytes_of(one)) for one in hosts if one.nbytes >= ALIAS_FROM])


def _hosts(arrays: Sequence[Any]) -> list[np.ndarray] | None:
    """Return the arrays as NumPy arrays; None if one of them is more than its bytes in this process's memory."""
    try:
        if any(isinstance(one, jax.Array) and one.ndim == 0 and one.weak_type for one in arrays):
            return None
        return [np.asarray(one) if isinstance(one, jax.Array) else _as_jax_would(one) for one in arrays]
    except (AttributeError, TypeError, RuntimeError):  # a random key, a traced array ...: see ``arrays.reduce_jax``
        return None


def _as_jax_would(value: Any) -> np.ndarray:
    """Convert to an array of the dtype that JAX would use here. Raises TypeError if JAX has no such dtype."""
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.names:
        raise TypeError(f"JAX has no {array.dtype}")
    kept = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    return array if array.dtype == kept and array.dtype.isnative else array.astype(kept)


@functools.lru_cache(maxsize=4096)
def _note(kinds: Kinds) -> bytes:
    return "\n".join([" ".join([dtype_name(dtype), *map(str, shape)]) for dtype, shape in kinds]).encode()


@functools.lru_cache(maxsize=4096)
def _places(note: bytes) -> list[tuple[np.dtype, tuple[int, ...], slice | None]]:
    """Return dtype, shape and slice of the block for each array; the slice of a large array is None."""
    places, start = [], 0
    for line in note.decode().splitlines():
        name, *sizes = line.split()
        dtype, shape = named_dtype(name), tuple(map(int, sizes))
        size = dtype.itemsize * math.prod(shape)
        places.append((dtype, shape, slice(start, start + size) if size < ALIAS_FROM else None))
        if size < ALIAS_FROM:
            start += padded(size)
    return places


def arrived(note: bytes, block: bytes, large: list[Any]) -> list[Any]:
    """Rebuild the arrays from the note, the block of small arrays, and the large arrays."""
    data, rest, found = np.frombuffer(block, np.uint8), iter(large), []
    for dtype, shape, place in _places(note):
        if dtype.itemsize >= 8:
            check_kept(dtype, jax.dtypes.canonicalize_dtype(dtype))
        # That it is read-only, and its base no array, marks what came over the wire: see ``as_jax_array``.
        part = np.frombuffer(memoryview(next(rest)), np.uint8) if place is None else data[place]
        part.flags.writeable = False
        found.append(part.view(dtype).reshape(shape))
    return found
