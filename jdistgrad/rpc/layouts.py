"""Values pushed between workers: a key, a layout and arrays. A layout that was seen before is only looked up.

A layout is the tree of a value, and the kind, dtype and shape of each of its arrays. A loop pushes many values of few
layouts; pickle would say the same again each time.
"""

import functools
import math
import struct
from typing import Any

import jax
import numpy as np

from jdistgrad.rpc.fingerprints import functions_in
from jdistgrad.rpc.functions import import_path
from jdistgrad.wire import arrays, pinned
from jdistgrad.wire.message import Codec, Parcel

Type = tuple[bool, str, tuple[int, ...]]  # whether the array is JAX's, its dtype and its shape

HEAD = struct.Struct("<II")  # how many numbers the key has; what follows the key
PICKLED, LAID_OUT = 0, 1
REMEMBERED = 1024


class Layouts:
    """The encoding of pushed values.

    Arguments:
      codec: encodes layouts, and the values that do not consist of plain arrays.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self._written = functools.lru_cache(REMEMBERED)(self._write)
        self._read = functools.lru_cache(REMEMBERED)(self._decoded)

    def encode(self, key: tuple[int, ...], value: Any) -> Parcel:
        """Return a value's parcel. Dicts arrive in the order of their keys. The arrays must not change meanwhile."""
        leaves, layout = self._apart(value)
        if not layout:
            parcel = self._codec.encode(value, snapshot=False)
            return Parcel(_stream(key, PICKLED, parcel.stream), parcel.buffers, parcel.attached, parcel.undo)
        copies = pinned.of_all(lambda: leaves)
        buffers = [
            arrays.bytes_of(leaf if type(leaf) is np.ndarray else np.asarray(copies.of(leaf))) for leaf in leaves
        ]
        return Parcel(_stream(key, LAID_OUT, layout), buffers)

    def _apart(self, value: Any) -> tuple[list[Any], bytes]:
        """Return a value's arrays and its layout; no layout if the value has to be pickled."""
        try:
            leaves, tree = jax.tree.flatten(value)
        except Exception:  # keys without an order, or a user's class that raises: pickle knows better
            return [], b""
        types = tuple(map(_type_of, leaves))
        return leaves, b"" if None in types else self._written(tree, types)

    def _write(self, tree: Any, types: tuple[Type, ...]) -> bytes:
        try:
            example = jax.tree.unflatten(tree, range(len(types)))
            same = jax.tree.structure(example) == tree
            return bytes(self._codec.encode((example, types), snapshot=False).stream) if same else b""
        except Exception:  # a user's class that takes arrays only
            return b""

    def decode(self, parcel: Parcel) -> tuple[tuple[int, ...], Any]:
        """Return the key and the value, with NumPy arrays: what compiled code takes need not be made JAX's first.

        Only where there are accelerators, large arrays are JAX's, so that they are copied there once.

        Raises:
          FunctionError: the value has a function or class that this worker does not have.
        """
        numbers, form = HEAD.unpack_from(parcel.stream)
        _, _, *key = _numbers(numbers).unpack_from(parcel.stream)
        rest = parcel.stream[HEAD.size + 8 * numbers :]
        below = arrays.ALIAS_FROM if pinned.accelerated() else math.inf
        if form != LAID_OUT:
            with arrays.as_numpy(below):
                return tuple(key), self._codec.decode(Parcel(rest, parcel.buffers, parcel.attached))
        tree, types, named = self._read(bytes(rest))
        if not all(import_path(one) == path for path, one in named):  # a cell of a notebook has defined it again
            self._read.cache_clear()
            tree, types, _ = self._read(bytes(rest))
        leaves = [
            (arrays.rebuild_jax if is_jax and data.nbytes >= below else arrays.rebuild_numpy)(data, dtype, shape)
            for (is_jax, dtype, shape), data in zip(types, parcel.buffers, strict=True)
        ]
        return tuple(key), jax.tree.unflatten(tree, leaves)

    def _decoded(self, written: bytes) -> tuple[Any, tuple[Type, ...], list[tuple[Any, Any]]]:
        """Return a layout that arrived, and the functions and classes in it by their names."""
        example, types = self._codec.decode(Parcel(written, []))
        named = [(import_path(one), one) for one in functions_in(example)]
        return jax.tree.structure(example), types, [one for one in named if one[0] is not None]


def _stream(key: tuple[int, ...], form: int, rest: Any) -> memoryview:
    return memoryview(b"".join((_numbers(len(key)).pack(len(key), form, *key), rest)))


@functools.cache
def _numbers(count: int) -> struct.Struct:
    """Return the form of what precedes a layout: the head, and the key's numbers."""
    return struct.Struct(f"{HEAD.format}{count}q")


def _type_of(leaf: Any) -> Type | None:
    """Return the type of an array whose bytes say all else; None for anything else."""
    if type(leaf) is np.ndarray:
        return None if leaf.dtype.hasobject or leaf.dtype.names else (False, arrays.dtype_name(leaf.dtype), leaf.shape)
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
        return None
    if not isinstance(leaf.dtype, np.dtype) or (leaf.weak_type and not leaf.ndim):  # random keys; numbers
        return None
    return True, arrays.dtype_name(leaf.dtype), leaf.shape
