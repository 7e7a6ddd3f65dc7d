"""Functions made by functions of importable modules: they travel by the name of their code, with what they closed over.

``optax.adam(1e-3)`` is such a pair of functions. No code is sent: the other side takes it from its own copy of the
module, from a function in memory or, if there is none, from the module's file.
"""

import functools
import inspect
import sys
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jdistgrad.errors import FunctionError
from jdistgrad.rpc.named import import_path, refuse
from jdistgrad.rpc.programs import imported, refusal
from jdistgrad.rpc.unpickling import refused, require_texts

Place = tuple[str, int, int]  # of code in its module: qualified name, line, and checksum
Codes = dict[Place, types.CodeType]

_incomplete: "weakref.WeakSet[types.FunctionType]" = weakref.WeakSet()  # functions made, but not yet completed


class WithClosures:
    """A value to be sent whose functions may be closures made by functions of importable modules."""

    def __init__(self, value: Any):
        self.value = value


def reduce(function: types.FunctionType) -> Any:
    """Return how to pickle a closure. Raises FunctionError if its code is not found in its module."""
    module, place = str(function.__globals__.get("__name__")), place_of(function.__code__)
    if code_at(module, place) is None:
        raise refuse(function)
    cells = [_contents(cell) for cell in function.__closure__ or ()]
    names = function.__name__, function.__qualname__, function.__module__
    rest = function.__defaults__, function.__kwdefaults__, function.__dict__
    return make, (module, place, len(cells)), (cells, names, rest), None, None, complete


def parts_of_closure(function: types.FunctionType, inside: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
    """Return the arguments by which ``closure_of`` makes the same function again, or None.

    It would not be the same if it held what may change. Nor is it one whose code the other side does not find.

    Arguments:
      inside: the functions that hold this one: one that holds itself cannot be made after what it holds.
    """
    module, place = str(function.__globals__.get("__name__")), place_of(function.__code__)
    contents = list(map(_contents, function.__closure__ or ()))
    keyword_defaults = tuple((function.__kwdefaults__ or {}).items())
    held = *contents, function.__defaults__, keyword_defaults
    if function.__dict__ or not all(contents) or not all(_never_changes(one, (*inside, function)) for one in held):
        return None
    if module not in sys.modules or code_at(module, place) is None:
        return None
    names = function.__name__, function.__qualname__, function.__module__
    return module, place, names, function.__defaults__, keyword_defaults, *(one for (one,) in contents)


def _never_changes(value: Any, inside: tuple[Any, ...]) -> bool:
    if isinstance(value, tuple):
        return all(_never_changes(one, inside) for one in value)
    if isinstance(value, types.FunctionType):
        return value not in inside and (import_path(value) is not None or parts_of_closure(value, inside) is not None)
    return isinstance(value, int | float | complex | str | bytes | type | np.dtype | None)


def closure_of(module: str, place: Place, names: Any, defaults: Any, keyword_defaults: Any, *contents: Any) -> Any:
    """Return the function that ``parts_of_closure`` has taken apart."""
    function = make(module, place, len(contents))
    complete(function, ([(one,) for one in contents], names, (defaults, dict(keyword_defaults) or None, {})))
    return function


def make(module: str, place: Place, cells: int) -> types.FunctionType:
    """Return the function with this code, and with empty cells: they may hold the function itself."""
    require_texts(module, place[0])
    name = place[0].partition(".")[0]  # what is inside cannot be found by its own name
    if refusal(module, name) is not None:
        raise refused(module, name)
    imported(module)
    code = code_at(module, place)
    if code is None:
        raise FunctionError(
            f"this worker has no {module}.{place[0]} like the one of line {place[1]} that was sent. Every worker must "
            f"run the same version of {module}.",
            function=f"{module}.{place[0]}",
        )
    closure = tuple(types.CellType() for _ in range(cells))
    function = types.FunctionType(code, vars(sys.modules[module]), closure=closure)
    _incomplete.add(function)
    return function


def complete(function: types.FunctionType, state: Any) -> None:
    """Fill in what a function closed over, its defaults and its attributes.

    Raises:
      FunctionError: it is not a function that ``make`` has just made, but one of the program.
    """
    if function not in _incomplete:
        raise FunctionError(f"a message would change {function!r:.100}, which it has not made: it was forged")
    _incomplete.discard(function)
    cells, names, (defaults, keyword_defaults, attributes) = state
    for cell, contents in zip(function.__closure__ or (), cells, strict=True):
        if contents:
            (cell.cell_contents,) = contents
    function.__name__, function.__qualname__, function.__module__ = names
    function.__defaults__, function.__kwdefaults__ = defaults, keyword_defaults
    function.__dict__.update(attributes)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return ()


def place_of(code: types.CodeType) -> Place:
    plain = [one for one in code.co_consts if not isinstance(one, types.CodeType | frozenset)]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, plain))
    return code.co_qualname, code.co_firstlineno, zlib.crc32(text.encode(errors="replace"))


def code_at(module: str, place: Place) -> types.CodeType | None:
    """Return the code at a place of an imported module, or None if there is none."""
    found = _codes_in_memory(module).get(place)
    if found is None:
        _codes_in_memory.cache_clear()  # the module may have been imported again, or may have made more functions
        found = _codes_in_memory(module).get(place) or _codes_in_file(module).get(place)
    return found


@functools.lru_cache(maxsize=256)
def _codes_in_memory(module: str) -> Codes:
    namespace = dict(vars(sys.modules[module]))
    found = (code for value in namespace.values() for code in _codes(value, module))
    return {place_of(one): one for code in found for one in parts_of(code)}


def _codes_in_file(module: str) -> Codes:
    loaded = sys.modules[module]
    name = loaded.__spec__.name if loaded.__spec__ is not None else module
    try:
        code = loaded.__loader__.get_code(name)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError):  # a notebook, or a loader of another kind
        return {}
    inside = [one for one in code.co_consts if isinstance(one, types.CodeType)] if code is not None else []
    return {place_of(one): one for part in inside for one in parts_of(part)}


def _codes(value: Any, module: str) -> Iterator[types.CodeType]:
    """Return the code of a function and of those it decorates, or that of the methods of a class."""
    if isinstance(value, type):
        for method in list(vars(value).values()) if value.__module__ == module else ():
            if not isinstance(method, type):
                yield from _codes(getattr(method, "__func__", method), module)
        return
    while value is not None:
        if isinstance(value, types.FunctionType) and value.__globals__.get("__name__") == module:
            yield value.__code__
        value = inspect.getattr_static(value, "__wrapped__", None)


def parts_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from parts_of(one)
