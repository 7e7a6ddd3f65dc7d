"""The C structures of XLA's foreign function interface that a Python handler needs, as ctypes.

The definitions follow ``xla/ffi/api/c_api.h``, which every jaxlib ships. The interface only ever grows at the ends of
its structures; a handler states its version (``VERSION``), and XLA refuses versions that it cannot serve.
"""

import ctypes
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

VERSION = 0, 1
METADATA = 1  # the extension by which XLA asks a handler for its version
EXECUTE = 3  # the stage in which the arguments are available

_Pointer, _Pointers, _Size = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t
_START: list[tuple[str, Any]] = [("struct_size", _Size), ("extension_start", _Pointer)]

Function = ctypes.CFUNCTYPE(_Pointer, _Pointer)  # a function of a frame's address, kept as long as XLA may call it
_function = functools.cache(Function)  # by address: XLA's functions do not move
_VERSION: list[tuple[str, Any]] = [  # a structure inside others
    ("version_size", _Size),
    ("version_extension", _Pointer),
    ("major", ctypes.c_int),
    ("minor", ctypes.c_int),
]


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


_COUNT, _TYPES = ("size", ctypes.c_int64), ("types", _Pointer)
_Metadata = _structure("Metadata", ("struct_size", _Size), *_VERSION, ("traits", ctypes.c_uint32))
_Extension = _structure(  # of a frame; only that of the type METADATA has ``metadata``
    "Extension",
    ("struct_size", _Size),
    ("type", ctypes.c_int),
    ("next", _Pointer),
    ("metadata", ctypes.POINTER(_Metadata)),
)
_Values = _structure("Values", *_START, _COUNT, _TYPES, ("values", _Pointers))  # the arguments or results of a call
_Attributes = _structure("Attributes", *_START, _COUNT, _TYPES, ("names", _Pointer), ("values", _Pointers))
_Buffer = _structure("Buffer", *_START, ("dtype", ctypes.c_int), ("data", _Pointer))
_Scalar = _structure("Scalar", ("dtype", ctypes.c_int), ("value", _Pointer))
_ErrorArguments = _structure("ErrorArguments", *_START, ("message", ctypes.c_char_p), ("code", ctypes.c_int))
_FutureArguments = _structure("FutureArguments", *_START, ("future", _Pointer), ("error", _Pointer))
# Returns the id of the program's run (64 bits) or of the device (32 bits).
_ContextArguments = _structure("ContextArguments", *_START, ("context", _Pointer), ("number", ctypes.c_int64))


class _Interface(ctypes.Structure):
    """XLA's table of functions. Entries between the used ones have no names here."""

    _fields_ = [
        *_START,
        *_VERSION,
        ("internal", _Pointer),
        ("create_error", _Pointer),
        ("unused", _Pointer * 12),
        ("create_future", _Pointer),
        ("set_available", _Pointer),
        ("set_error", _Pointer),
        ("run_of", _Pointer),
        ("device_of", _Pointer),
    ]


class CallFrame(ctypes.Structure):
    """The call frame that XLA passes to a handler."""

    _fields_ = [
        *_START,
        ("interface", _Pointer),
        ("context", _Pointer),
        ("stage", ctypes.c_int),
        ("operands", _Values),
        ("results", _Values),
        ("attributes", _Attributes),
        ("future", _Pointer),
    ]

    def is_version_query(self) -> bool:
        """Return whether XLA only asks for the handler's version; answer if so."""
        extension = _Extension.from_address(self.extension_start) if self.extension_start else None
        if extension is None or extension.type != METADATA:
            return False
        metadata = extension.metadata[0]
        metadata.major, metadata.minor = VERSION
        metadata.traits = 0
        return True

    def number_and_copy(self) -> tuple[int, int]:
        """Return the call's attribute, an unsigned 64-bit integer, and its address.

        XLA inlines a function wherever the program calls it, so a program may contain copies of a call. The address
        identifies a copy, on all devices that run the program.
        """
        address = int(_Scalar.from_address(self.attributes.values[0]).value)
        return ctypes.c_uint64.from_address(address).value, address

    def run_and_device(self) -> tuple[int, int]:
        """Return the id of the program's run, the same on all its devices, and that of the device."""
        interface, found = _Interface.from_address(self.interface), []
        for query in (interface.run_of, interface.device_of):
            arguments = _ContextArguments(struct_size=ctypes.sizeof(_ContextArguments), context=self.context)
            if _function(query)(ctypes.addressof(arguments)):
                raise RuntimeError("XLA returned no id of the run or the device")
            found.append(int(arguments.number))
        return found[0], found[1]

    def begin(self) -> "AsyncResult":
        """Make the call asynchronous: the handler may return. XLA keeps operands and results until the call is done."""
        interface = _Interface.from_address(self.interface)
        arguments = _FutureArguments(struct_size=_FutureArguments.error.offset)
        if _function(interface.create_future)(ctypes.addressof(arguments)):
            raise RuntimeError("XLA created no future")
        self.future = arguments.future
        return AsyncResult(interface, arguments.future)

    def error(self, message: str, code: int) -> int:
        return _error(_Interface.from_address(self.interface), message, code)


@dataclasses.dataclass
class AsyncResult:
    """An asynchronous call. Exactly one of its methods must be called, once."""

    interface: _Interface
    future: int

    def done(self) -> None:
        """Report that the results are ready. Programs that wait for them may run on this thread before this returns."""
        arguments = _FutureArguments(struct_size=_FutureArguments.error.offset, future=self.future)
        _function(self.interface.set_available)(ctypes.addressof(arguments))

    def failed(self, message: str, code: int) -> None:
        error = _error(self.interface, message, code)
        arguments = _FutureArguments(struct_size=ctypes.sizeof(_FutureArguments), future=self.future, error=error)
        _function(self.interface.set_error)(ctypes.addressof(arguments))


def _error(interface: _Interface, message: str, code: int) -> int:
    text = message.encode(errors="replace")
    arguments = _ErrorArguments(struct_size=ctypes.sizeof(_ErrorArguments), message=text, code=code)
    error: int = _function(interface.create_error)(ctypes.addressof(arguments))
    return error


def view(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a buffer's memory as an array. XLA owns the memory, which is valid until the call is done."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    memory = (ctypes.c_uint8 * size).from_address(_Buffer.from_address(address).data)
    return np.frombuffer(memoryview(memory), np.uint8).view(dtype).reshape(shape)


def carrier(dtype: Any) -> np.dtype:
    """Return the dtype in which a call passes arrays of a dtype: XLA packs elements of less than a byte."""
    kind = np.dtype(dtype)
    if jax.numpy.issubdtype(kind, np.integer) and jax.numpy.iinfo(kind).bits < 8:
        return np.dtype(np.int8 if jax.numpy.issubdtype(kind, np.signedinteger) else np.uint8)
    if jax.numpy.issubdtype(kind, np.floating) and jax.numpy.finfo(kind).bits < 8:
        return np.dtype(np.float32)
    return kind
