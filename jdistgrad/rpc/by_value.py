"""Functions and classes of the program in worlds that allow code: the receiver's own, or else those of the sender.

What is jitted, or has a custom rule, is the same object in all calls: what was compiled for it is found again.
"""

import functools
import io
import pickle
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import jax

from jdistgrad._compat import static_arguments
from jdistgrad.errors import FunctionError
from jdistgrad.rpc import closures
from jdistgrad.rpc.functions import lookup
from jdistgrad.rpc.named import JITTED, by_name, sent_by
from jdistgrad.rpc.references.in_messages import encoding

WITH_RULES: Any = jax.custom_vjp | jax.custom_jvp
KEPT = 64  # functions that were sent by value: some KiB each, and what they hold

LARGEST = 1 << 20  # bytes: a function without a name that closes over more is sent anew, and not kept

Sent = tuple[int, bytes | None]  # what tells a function from others, and the function by value

_sent: "weakref.WeakKeyDictionary[Any, Sent]" = weakref.WeakKeyDictionary()


def reduction(value: Any) -> Any:
    """Return how to pickle a jitted function, or one with a custom rule, by value. NotImplemented for all others."""
    if isinstance(value, JITTED | WITH_RULES):
        _, code = _likeness_and_code(value)
        if code is not None and len(code) <= LARGEST:
            return loaded, (code,)
    return _in_parts(value)


def _in_parts(value: Any) -> Any:
    """Return how to pickle such a function as one that is made anew, and compiled anew, from what it wraps."""
    if isinstance(value, JITTED):
        wrapped: Any = value
        return jitted, (wrapped.__wrapped__, *static_arguments(value))
    if isinstance(value, WITH_RULES):
        return object.__new__, (type(value),), vars(value)
    return NotImplemented


def jitted(function: Callable[..., Any], numbers: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.jit(function, static_argnums=numbers, static_argnames=names)


class _Code(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        reduced = _in_parts(value)
        return super().reducer_override(value) if reduced is NotImplemented else reduced


def code_of(value: Any) -> bytes | None:
    """Return a class or a function by value, or None if a part of it cannot be sent, or not twice: a reference."""
    stream = io.BytesIO()
    try:
        with encoding(None):
            _Code(stream, protocol=5).dump(value)
    except Exception:  # whatever the reason: it travels by its name alone
        return None
    return stream.getvalue()


def function_sent_by(path: tuple[str, str], function: Any) -> Any:
    """Return how to pickle a function that has a name in the program, which may have given it to another since."""
    if not isinstance(function, JITTED | WITH_RULES):
        return sent_by(path, function)
    return own_alike_or_sent, (*path, *_likeness_and_code(function))


def _likeness_and_code(function: Any) -> Sent:
    """Return how to tell a jitted function or one with a custom rule, and the function: the same bytes each time."""
    if isinstance(function, WITH_RULES):  # its rules may be replaced
        return likeness(function), code_of(function)
    if function not in _sent:
        _sent[function] = likeness(function), code_of(function)
    return _sent[function]


def own_alike_or_sent(module: str, qualname: str, like: int, code: bytes | None) -> Any:
    """Return the function of this name here if it has the same code, or else the function that was sent by value.

    Raises:
      FunctionError: there is none, or another, and the sender's could not be sent by value.
    """
    try:
        found = lookup(module, qualname)
    except (ImportError, AttributeError):
        found = None
    if found is not None and likeness(found) == like:
        return found
    if code is not None:
        return loaded(code)
    if found is None:
        return by_name(module, qualname)  # which raises an error that says so
    raise FunctionError(
        f"{module}.{qualname} has other code on this worker than on the one that sent it, and cannot be sent by value: "
        "it holds what cannot be pickled. Define it alike on all workers.",
        function=f"{module}.{qualname}",
    )


def loaded(code: bytes) -> Any:
    """Return the function that was sent by value: the one that came before by the same bytes, if it is still kept."""
    return _loaded(code)


_loaded = functools.lru_cache(maxsize=KEPT)(pickle.loads)


def likeness(function: Any) -> int:
    """Return a number that tells a function from others with other code."""
    codes = [closures.place_of(code) for one in _parts(function) for code in closures.parts_of(one.__code__)]
    return zlib.crc32(repr(codes).encode(errors="replace"))


def _parts(function: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that a function is made of: those it wraps, and its custom rules."""
    found, left = list[Any](), [function]
    while left:
        one = left.pop()
        if not isinstance(one, types.FunctionType | JITTED | WITH_RULES) or any(one is known for known in found):
            continue
        found.append(one)
        left += vars(one).values()
        if isinstance(one, types.FunctionType):
            yield one


def own_or_sent(module: str, qualname: str, code: bytes | None) -> Any:
    """Return the class of this name here, or, if there is none, the class that was sent by value.

    JAX's registry of pytrees and ``except`` clauses depend on the identity of the class. Only a world that allows code
    finds this function.
    """
    try:
        found = lookup(module, qualname)
    except (ImportError, AttributeError):
        found = None
    if isinstance(found, type) or code is None:
        return found if isinstance(found, type) else by_name(module, qualname)
    return pickle.loads(code)
