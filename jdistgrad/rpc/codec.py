"""Encoding of values between processes: pickle protocol 5, arrays out of band, references split.

Functions and classes travel by name if the name leads back to them, else by value (``by_value``).
"""

import contextlib
import functools
import io
import math
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import jax

from jdistgrad.errors import DistgradError, EncodingError, FunctionError
from jdistgrad.leaves import may_be_written
from jdistgrad.rpc import by_value, prepared, trees
from jdistgrad.rpc.claims import Shipment, decoding, encoding
from jdistgrad.rpc.failures import spelled
from jdistgrad.wire import arrays, pinned
from jdistgrad.wire.message import Parcel

KEPT, LONGEST = 1024, 1 << 12  # streams that are kept, and their bytes


Key = tuple[int, ...]  # of a pushed value: fewer than 256 numbers


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
        copies = pinned.of_all(trees.leaves(value)) if pinned.accelerated() else pinned.NONE
        found = prepared.Found()
        key = prepared.key_of(value, found, copies)
        stream = None if key is None else self._streams.get(key)
        if stream is None:
            parcel = self._pickled(value, copies, snapshot=snapshot)
            same = len(parcel.buffers) == len(found.arrays) and not parcel.attached
            if key is not None and same and len(parcel.stream) <= LONGEST:
                if len(self._streams) >= KEPT:
                    self._streams.clear()
                self._streams[key] = parcel.stream
            return parcel
        raw = [
            one.data if one.nbytes < arrays.ALIAS_FROM and one.flags.c_contiguous else arrays.bytes_of(one)
            for one in found.arrays.values()
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
