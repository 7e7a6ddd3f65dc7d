"""How values travel between processes: pickle protocol 5, arrays out of band, functions by name, references split."""

import io
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import numpy as np

from jdistgrad.errors import DistgradError, EncodingError, FunctionError
from jdistgrad.rpc import functions, trees
from jdistgrad.wire import arrays
from jdistgrad.wire.message import Parcel

JITTED = type(jax.jit(lambda: None))

_shipments = threading.local()


def on_shipment(undo: Callable[[], None]) -> None:
    """Called while a value is being encoded: ``undo`` runs if it cannot be sent after all.

    Raises EncodingError outside an encoding: what needs it has no meaning in an ordinary pickle.
    """
    pending = getattr(_shipments, "pending", None)
    if pending is None:
        raise EncodingError(
            "a remote reference can only travel inside a call of jdistgrad: pickled by itself nobody would know of "
            "the copy. Send it as an argument or a result, or save rref.to_here() instead."
        )
    pending.append(undo)


class _Reducing:
    """The rules both picklers share."""

    snapshot: bool = False
    last_function: Any = None

    def reduction(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return arrays.reduce_numpy(value, snapshot=self.snapshot)
        if kind is types.FunctionType or kind is JITTED:
            return self.function(value)
        if isinstance(value, jax.Array):
            return arrays.reduce_jax(value)
        if isinstance(value, type | types.BuiltinFunctionType):
            return NotImplemented
        path = functions.import_path(value)  # jnp.add, custom_vjp functions ...
        return NotImplemented if path is None else (functions.by_name, path)

    def function(self, function: Any) -> Any:
        name = functions.registered_name(function)
        if name is not None:
            return functions.registered, (name,)
        if isinstance(function, types.FunctionType):
            return self.plain_function(function)
        path = functions.import_path(function)
        return self.jitted_code(function) if path is None else (functions.by_name, path)

    def plain_function(self, function: Any) -> Any:
        self.last_function = function
        return NotImplemented  # pickle writes the name in C, and checks that it leads back here

    def jitted_code(self, function: Any) -> Any:
        raise functions.refuse(function)


class NamePickler(_Reducing, pickle.Pickler):
    """Functions travel by name only."""

    def reducer_override(self, value: Any) -> Any:
        return self.reduction(value)


class CodePickler(_Reducing, cloudpickle.Pickler):
    """Functions that nobody can import travel by value."""

    def reducer_override(self, value: Any) -> Any:
        reduced = self.reduction(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced

    def plain_function(self, function: Any) -> Any:
        return super(_Reducing, self).reducer_override(function)

    def jitted_code(self, function: Any) -> Any:
        return jax.jit, (function.__wrapped__,)


class Codec:
    """Encodes for one world. ``allow_code`` says whether code may travel by value."""

    def __init__(self, *, allow_code: bool):
        self._pickler = CodePickler if allow_code else NamePickler

    def encode(self, value: Any, *, snapshot: bool) -> Parcel:
        stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler = self._pickler(stream, protocol=5, buffer_callback=buffers.append)
        pickler.snapshot = snapshot
        outer, _shipments.pending = getattr(_shipments, "pending", None), []
        try:
            pickler.dump(value)
        except BaseException as error:
            explained = self._explained(error, pickler.last_function, value)
            for undo in _shipments.pending:
                undo()
            raise explained from error
        finally:
            _shipments.pending = outer
        return Parcel(stream.getbuffer(), buffers)

    def _explained(self, error: BaseException, function: Any, value: Any) -> BaseException:
        """What the user shall see: which function, or which part of the value, and what is wrong with it."""
        if isinstance(error, DistgradError) or not isinstance(error, Exception):
            return error
        if function is not None and functions.import_path(function) is None:
            return functions.refuse(function)
        return EncodingError(f"{self._culprit(value)}{type(error).__name__}: {error}")

    def _culprit(self, value: Any) -> str:
        """The path of the first leaf that cannot be encoded by itself."""
        for path, leaf in trees.leaves_with_path(value):
            try:
                self._pickler(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: None).dump(leaf)
            except Exception:  # any reason will do: the first error has been kept
                return f"at {jax.tree_util.keystr(path)}, a {type(leaf).__name__}: " if path else ""
        return ""

    def decode(self, parcel: Parcel) -> Any:
        try:
            return pickle.loads(parcel.stream, buffers=parcel.buffers)
        except DistgradError:
            raise
        except (AttributeError, ImportError) as error:
            raise FunctionError(
                f"a message names something this worker does not have: {error}. Every worker must run the same "
                "version of every module."
            ) from error
        except Exception as error:
            raise EncodingError(f"a message could not be rebuilt: {type(error).__name__}: {error}") from error
