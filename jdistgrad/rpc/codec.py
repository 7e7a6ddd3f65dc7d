"""Encoding of values between processes: pickle protocol 5, arrays out of band, references split.

Functions and classes travel by name if the name leads back to them, else by value (``by_value``).

Many messages differ in numbers alone: functions by name, and containers of arrays. Such a value has a key, and values
with the same key have the same pickle stream.
"""

import contextlib
import functools
import io
import math
import pickle
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jdistgrad._compat import ARRAY
from jdistgrad.errors import DistgradError, EncodingError, FunctionError
from jdistgrad.leaves import EXTENSIONS_FROM, may_be_written
from jdistgrad.rpc import by_value, trees
from jdistgrad.rpc.by_value import Cached
from jdistgrad.rpc.claims import Shipment, decoding, encoding
from jdistgrad.rpc.failures import spelled
from jdistgrad.rpc.functions import JITTED, qualified_name, registered_name
from jdistgrad.wire import arrays, pinned
from jdistgrad.wire.arrays import ArrayBlock
from jdistgrad.wire.message import Parcel

KEPT, LONGEST = 1024, 1 << 12  # streams that are kept, and their bytes

Key = tuple[int, ...]  # of a pushed value: fewer than 256 numbers
NUMBERS = "biufc"  # kinds of NumPy's dtypes whose memory Python can see
BY_NAME = {
    types.FunctionType, types.BuiltinFunctionType, JITTED, jax.custom_jvp, jax.custom_vjp, jax.numpy.ufunc, np.ufunc,
}  # fmt: skip
# Classes whose pickle is a function, the same for all objects, and parts that may have a key.
BY_PARTS: set[type] = set()
SHORT = 64  # characters


Arrays = dict[int, np.ndarray]  # by the identity of what is to be sent


class _NoKeyError(Exception):
    """A value has no key, or it would take longer to find than to pickle the value."""


def key_of(value: Any, found: Arrays, copies: pinned.Copies) -> Any:
    """Return a value's key, or None; add its arrays, in the order in which they are pickled.

    Arguments:
      copies: of arrays on accelerators, in this process's memory.
    """
    try:
        return _key(value, found, copies)
    except (_NoKeyError, RecursionError, RuntimeError):  # JAX raises the last, for arrays whose bytes are not here
        return None


def _key(value: Any, found: Arrays, copies: pinned.Copies) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        if not _is_plain(value.dtype) or id(value) in found:
            raise _NoKeyError
        found[id(value)] = value
        return value.dtype, value.shape, value.flags.writeable
    if kind is ARRAY:
        host = np.asarray(value if copies is pinned.NONE else copies.of(value))
        if not _is_plain(host.dtype) or id(value) in found or (not host.shape and value.weak_type):
            raise _NoKeyError
        found[id(value)] = host
        return kind, host.dtype, host.shape
    if kind in BY_NAME:
        return kind, *_place(value)
    if value is None or kind is bool or (kind is str and len(value) <= SHORT):
        return kind, value
    return _key_of_container(kind, value, found, copies)


def _key_of_container(kind: type, value: Any, found: Arrays, copies: pinned.Copies) -> Any:
    """Return the key of what has parts. A list or dict without arrays has none: it may be in several places."""
    before, key = len(found), list[Any]([kind])
    if kind is dict:
        if not all(type(name) is str for name in value):
            raise _NoKeyError
        key += value  # the names, in their order
        value = value.values()
    elif kind in BY_PARTS:
        (value,) = value.__reduce__()[1:2]
    elif kind is ArrayBlock:
        value = value.hosts()
    elif kind is Cached:
        return value
    elif kind is not tuple and kind is not list:
        raise _NoKeyError
    for one in value:
        key += (_key(one, found, copies),)
    if kind in (list, dict) and len(found) == before:
        raise _NoKeyError
    return tuple(key)


def _is_plain(dtype: np.dtype) -> bool:
    """Return whether Python can see the memory of arrays of a dtype."""
    return dtype.kind in NUMBERS and dtype.num < EXTENSIONS_FROM


def _place(function: Any) -> tuple[str, str, int]:
    """Return the module and name by which a function travels, and its likeness if that travels too.

    The key does not hold the function: a notebook defines it again and again.
    """
    module, name, like = function.__module__, qualified_name(function) or "", 0
    if getattr(sys.modules.get(module), name, None) is not function or registered_name(function):
        raise _NoKeyError
    if module == "__main__":
        like = by_value.likeness(function)
        if ((module, name), like) in by_value.asked_for:
            raise _NoKeyError
    return module, name, like


@functools.cache
def _numbers(count: int) -> struct.Struct:
    """Return the form of a key: how many numbers it has, and the numbers."""
    return struct.Struct(f"<B7x{count}q")


class MessagePickler(by_value.ObjectPickler):
    """Pickles a message, in which functions by value are the same bytes each time, for the receiver to find again."""

    def by_value(self, value: Any) -> Any:
        code = by_value.code_of(value)
        return super().by_value(value) if code is None else (by_value.from_code, (code,))


class PickleCodec:
    """The codec of a world whose workers are processes.

    Values that differ from earlier ones only in the numbers of their arrays have the same stream, which is looked up.
    """

    def __init__(self) -> None:
        self._streams: dict[Any, bytes] = {}

    def encode(self, value: Any, *, snapshot: bool) -> Parcel:
        copies = pinned.Copies(trees.leaves(value)) if pinned.accelerated() else pinned.NONE
        found: Arrays = {}
        key = key_of(value, found, copies)
        stream = None if key is None else self._streams.get(key)
        if stream is None:
            parcel = self._pickled(value, copies, snapshot=snapshot)
            same = len(parcel.buffers) == len(found) and not parcel.attached
            if key is not None and same and len(parcel.stream) <= LONGEST:
                if len(self._streams) >= KEPT:
                    self._streams.clear()
                self._streams[key] = parcel.stream
            return parcel
        raw = [
            one.data if one.nbytes < arrays.ALIAS_FROM and one.flags.c_contiguous else arrays.bytes_of(one)
            for one in found.values()
        ]
        return Parcel(stream, [_steady(one) for one in raw] if snapshot else raw)

    def _pickled(self, value: Any, copies: pinned.Copies, *, snapshot: bool) -> Parcel:
        buffers: list[pickle.PickleBuffer] = []
        stream, shipment = io.BytesIO(), Shipment()
        pickler = MessagePickler(stream, protocol=5, buffer_callback=buffers.append)
        pickler.copies = copies
        try:
            with encoding(shipment):
                pickler.dump(value)
            raw = [_steady(buffer.raw()) if snapshot else buffer.raw() for buffer in buffers]
        except BaseException as error:
            shipment.take_back()
            if isinstance(error, DistgradError) or not isinstance(error, Exception):
                raise
            raise self._explained(error, value) from error
        return Parcel(stream.getvalue(), raw, shipment.attachment(), shipment.take_back)

    def encode_pushed(self, key: Key, value: Any) -> Parcel:
        """Encode a value with its key. The arrays must not change until the parcel has been sent."""
        parcel = self.encode(value, snapshot=False)
        parcel.stream = b"".join((_numbers(len(key)).pack(len(key), *key), parcel.stream))
        return parcel

    def decode_pushed(self, parcel: Parcel) -> tuple[Key, Any]:
        """Return the key and the value, with NumPy arrays: what compiled code takes need not be made JAX's first.

        Only where there are accelerators, large arrays are JAX's, so that they are copied there once.
        """
        numbers = _numbers(parcel.stream[0])
        _, *key = numbers.unpack_from(parcel.stream)
        with arrays.as_numpy(arrays.ALIAS_FROM if pinned.accelerated() else math.inf):
            value = self.decode(Parcel(parcel.stream[numbers.size :], parcel.buffers, parcel.attached))
        return tuple(key), value

    def _explained(self, error: Exception, value: Any) -> DistgradError:
        """Return the error to raise, which names the part of the value that cannot be sent."""
        if isinstance(error.__cause__, RecursionError):
            return EncodingError(
                f"it is nested too deeply to be sent ({spelled(error)}). Send it as a flat list or array"
            )
        where, shipment = "", Shipment()
        with contextlib.suppress(Exception):  # of a value that JAX cannot take apart
            for path, leaf in jax.tree.leaves_with_path(value, is_leaf=lambda one: isinstance(one, Iterator)):
                try:
                    with encoding(shipment):
                        MessagePickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(leaf)
                except Exception:
                    where = f"at {jax.tree_util.keystr(path)}, a {type(leaf).__name__}: " if path else ""
                    break
        shipment.take_back()
        return EncodingError(f"{where}{spelled(error)}")

    def decode(self, parcel: Parcel) -> Any:
        try:
            if not parcel.attached:
                return pickle.loads(parcel.stream, buffers=parcel.buffers)
            with decoding(parcel.attached):
                return pickle.loads(parcel.stream, buffers=parcel.buffers)
        except DistgradError:
            raise
        except (AttributeError, ImportError) as error:
            raise FunctionError(
                f"a message names something this worker does not have: {error}. Every worker must run the same "
                "version of every module, and define the same functions: at top level, not where only some ranks run, "
                "and above jd.init(), or a worker may not have come to them yet."
            ) from error
        except Exception as error:
            raise EncodingError(f"a message could not be rebuilt: {spelled(error)}") from error


def hides_traced(value: Any) -> bool:
    """Return whether an object that JAX cannot look into holds a traced value."""
    try:
        with encoding(None):
            MessagePickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except Exception as error:  # an object that cannot be pickled is not searched
        return isinstance(error, EncodingError) and str(error) == arrays.TRACED
    return False


def _steady(buffer: memoryview) -> memoryview:
    """Return bytes that cannot change while they wait to be sent. Small buffers are copied into the frame anyway."""
    changes = buffer.nbytes >= arrays.ALIAS_FROM and (not buffer.readonly or may_be_written(buffer))
    return memoryview(bytearray(buffer)) if changes else buffer
