"""What is the same in many messages: functions by name, and containers of arrays, whose numbers alone differ.

Such a value has a key. Values with the same key have the same pickle stream.
"""

import sys
import types
from typing import Any

import jax
import numpy as np

from jdistgrad._compat import ARRAY
from jdistgrad.leaves import EXTENSIONS_FROM
from jdistgrad.rpc import by_value
from jdistgrad.rpc.by_value import Cached
from jdistgrad.rpc.functions import JITTED, qualified_name, registered_name
from jdistgrad.wire import pinned
from jdistgrad.wire.arrays import ArrayBlock

NUMBERS = "biufc"  # kinds of NumPy's dtypes whose memory Python can see
BY_NAME = {
    types.FunctionType, types.BuiltinFunctionType, JITTED, jax.custom_jvp, jax.custom_vjp, jax.numpy.ufunc, np.ufunc,
}  # fmt: skip
BY_PARTS: set[type] = (
    set()
)  # classes whose pickle is a function, the same for all objects, and parts that may have a key
SHORT = 64  # characters


class _NoKeyError(Exception):
    """A value has no key, or it would take longer to find than to pickle the value."""


class Found:
    """The arrays in a value, by the identity of what is to be sent, and the keys of its functions."""

    __slots__ = ("arrays", "functions")

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self.functions: dict[int, Any] = {}


def key_of(value: Any, found: Found, copies: pinned.Copies) -> Any:
    """Return a value's key, or None; add its arrays, in the order in which they are pickled.

    Arguments:
      copies: of arrays on accelerators, in this process's memory.
    """
    try:
        return _key(value, found, copies)
    except (_NoKeyError, RecursionError, RuntimeError):  # JAX raises the last, for arrays whose bytes are not here
        return None


def _key(value: Any, found: Found, copies: pinned.Copies) -> Any:
    kind = type(value)
    if kind is np.ndarray:
        if not _is_plain(value.dtype) or id(value) in found.arrays:
            raise _NoKeyError
        found.arrays[id(value)] = value
        return value.dtype, value.shape, value.flags.writeable
    if kind is ARRAY:
        host = np.asarray(value if copies is pinned.NONE else copies.of(value))
        if not _is_plain(host.dtype) or id(value) in found.arrays or (not host.shape and value.weak_type):
            raise _NoKeyError
        found.arrays[id(value)] = host
        return kind, host.dtype, host.shape
    if kind in BY_NAME:
        known = found.functions.get(id(value))
        if known is None:
            known = found.functions[id(value)] = kind, *_place(value)
        return known
    if value is None or kind is bool or (kind is str and len(value) <= SHORT):
        return kind, value
    return _key_of_container(kind, value, found, copies)


def _key_of_container(kind: type, value: Any, found: Found, copies: pinned.Copies) -> Any:
    """Return the key of what has parts. A list or dict without arrays has none: it may be in several places."""
    before, key = len(found.arrays), list[Any]([kind])
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
    if kind in (list, dict) and len(found.arrays) == before:
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
