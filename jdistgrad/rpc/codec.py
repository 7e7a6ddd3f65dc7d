"""Encoding of values between processes: pickle protocol 5, arrays out of band, functions by name, references split.

What a pickle may name is decided by ``unpickling``, unless the world allows code.
"""

import io
import pickle
import types
from typing import Any

import cloudpickle
import jax
import numpy as np

from jdistgrad.errors import DistgradError, EncodingError, FunctionError
from jdistgrad.rpc import by_value, closures, functions, named, trees, unpickling
from jdistgrad.rpc.cached import Cached
from jdistgrad.rpc.references.in_messages import Shipment, decoding, encoding
from jdistgrad.rpc.serving.failures import spelled
from jdistgrad.wire import arrays, pinned
from jdistgrad.wire.array_block import ArrayBlock
from jdistgrad.wire.frames import is_bulk
from jdistgrad.wire.message import Parcel

OWN: set[type] = {ArrayBlock, Cached}  # classes that define ``__reduce__`` for this codec


class _Reducing:
    """The rules that both picklers share."""

    last_function: Any = None
    last_named: Any = None  # a class, usually
    with_closures = False  # whether the value that is being pickled may hold closures of importable modules
    copies: pinned.Copies = pinned.NONE

    def reduction(self, value: Any) -> Any:
        kind = type(value)
        if kind in OWN:
            return NotImplemented
        if kind is np.ndarray:
            return arrays.reduce_numpy(value)
        name = functions.registered_name(value)
        if name is not None:
            return functions.registered, (name,)
        if kind is types.FunctionType:
            return self.plain_function(value)
        if kind is type:
            return self.by_its_name(value)
        if isinstance(value, jax.Array):
            return arrays.reduce_jax(self.copies.of(value))
        if isinstance(value, np.memmap) or (isinstance(value, np.ndarray) and hasattr(value, "aval")):
            return self.as_plain_array(np.asarray(value))  # a constant of JAX that is not a jax.Array
        if isinstance(value, type | types.BuiltinFunctionType | types.MethodType):
            return self.by_its_name(value)
        if kind is closures.WithClosures:
            self.with_closures = True
            return closures.WithClosures, (value.value,)
        return self.other(value)

    def as_plain_array(self, array: np.ndarray) -> Any:
        """Reduce an array in the place of one of a class that the other side has no use for."""
        reduced = arrays.reduce_numpy(array)
        return (np.asarray, (array,)) if reduced is NotImplemented else reduced

    def other(self, value: Any) -> Any:
        """Reduce an object of a user's class, or something that can be called."""
        path = named.import_path(value)  # jitted functions, jnp.add, custom_vjp functions ...
        if path is not None:
            return named.sent_by(path, value)
        return self.jitted_code(value) if type(value) is named.JITTED else NotImplemented

    def plain_function(self, function: Any) -> Any:
        self.last_function = function
        path = named.import_path(function)
        if path is None:
            if self.with_closures:
                return closures.reduce(function)
            raise named.refuse(function)
        return self.by_its_name(function) if path[1] == function.__qualname__ else named.sent_by(path, function)

    def by_its_name(self, value: Any) -> Any:
        """Let pickle write the name in C, where it checks that the name leads back here."""
        self.last_named = value
        unpickling.require_name(value)
        return NotImplemented

    def jitted_code(self, function: Any) -> Any:
        if self.with_closures:
            return jax.jit, (function.__wrapped__,)
        raise named.refuse(function)


class NamePickler(_Reducing, pickle.Pickler):
    """The pickler that sends functions by name only."""

    def reducer_override(self, value: Any) -> Any:
        return self.reduction(value)


class CodePickler(_Reducing, cloudpickle.Pickler):
    """The pickler that sends functions by value if they cannot be imported."""

    def reducer_override(self, value: Any) -> Any:
        reduced = self.reduction(value)
        if reduced is NotImplemented and isinstance(value, type) and value.__module__ == "__main__":
            reduced = self.class_of_the_program(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def class_of_the_program(self, value: type) -> Any:
        """Reduce a class of ``__main__`` to its name and its code, for a receiver that has not run this program."""
        path = named.import_path(value)
        return NotImplemented if path is None else (by_value.own_or_sent, (*path, by_value.code_of(value)))

    def plain_function(self, function: Any) -> Any:
        return super(_Reducing, self).reducer_override(function)

    def by_its_name(self, value: Any) -> Any:
        return NotImplemented

    def other(self, value: Any) -> Any:
        path = named.import_path(value)
        if path is None:
            return by_value.reduction(value)
        return by_value.function_sent_by(path, value) if path[0] == "__main__" else named.sent_by(path, value)


class PickleCodec:
    """The codec of one world. ``allow_code`` says whether code may travel by value."""

    def __init__(self, *, allow_code: bool):
        self._pickler = CodePickler if allow_code else NamePickler
        self._loads = pickle.loads if allow_code else unpickling.loads

    def encode(self, value: Any, *, snapshot: bool) -> Parcel:
        buffers: list[pickle.PickleBuffer] = []
        stream, shipment = io.BytesIO(), Shipment()
        pickler = self._pickler(stream, protocol=5, buffer_callback=buffers.append)
        try:
            pickler.copies = pinned.of_all(lambda: trees.leaves(value))
            with encoding(shipment):
                pickler.dump(value)
            raw = [_steady(buffer.raw()) if snapshot else buffer.raw() for buffer in buffers]
        except BaseException as error:
            shipment.take_back()
            if isinstance(error, DistgradError) or not isinstance(error, Exception):
                raise
            raise self._explained(error, pickler, value) from error
        return Parcel(memoryview(stream.getvalue()), raw, shipment.attachment(), shipment.take_back)

    def _explained(self, error: Exception, pickler: _Reducing, value: Any) -> DistgradError:
        """Return the error to raise, which names the function, or the part of the value, that cannot be sent."""
        function, kind = pickler.last_function, pickler.last_named
        if function is not None and named.import_path(function) is None:
            return named.refuse(function)
        if isinstance(error, RecursionError):
            return EncodingError(
                f"it is nested too deeply to be sent ({spelled(error)}). Send it as a flat list or array"
            )
        why = ""
        if "not the same object as" in str(error):  # pickle's own words
            why = ". It has been defined again since: make its objects, and what holds them, again"
        elif isinstance(kind, type) and named.import_path(kind) is None:  # made by nn.remat, or inside of a function
            why = f". {named.REMEDY}"
        return EncodingError(f"{self._culprit(value)}{spelled(error)}{why}")

    def _culprit(self, value: Any) -> str:
        """Return the path and type of the first leaf that cannot be encoded by itself, as text."""
        shipment = Shipment()
        try:
            for path, leaf in trees.leaves_with_keys(value):
                if not self._can_encode(leaf, shipment):
                    return f"at {jax.tree_util.keystr(path)}, a {type(leaf).__name__}: " if path else ""
        finally:
            shipment.take_back()
        return ""

    def _can_encode(self, leaf: Any, shipment: Shipment) -> bool:
        try:
            with encoding(shipment):
                self._pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(leaf)
        except Exception:  # whatever the reason: the original error is reported
            return False
        return True

    def decode(self, parcel: Parcel) -> Any:
        try:
            with decoding(parcel.attached):
                return self._loads(parcel.stream, buffers=parcel.buffers)
        except (DistgradError, FloatingPointError):  # the latter from arrays, where jax_debug_nans is set
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
            NamePickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(value)
    except EncodingError as error:
        return str(error) == arrays.TRACED
    except Exception:  # an object that cannot be pickled is not searched
        return False
    return False


def _steady(buffer: memoryview) -> memoryview:
    """Return bytes that cannot change while they wait to be sent. Small buffers are copied into the frame anyway."""
    changes = is_bulk(buffer.nbytes) and (not buffer.readonly or arrays.may_be_written(buffer))
    return memoryview(bytearray(buffer)) if changes else buffer
