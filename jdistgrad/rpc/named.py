"""Functions that travel by name: what a message names, and how the receiver sees that the name means the same there."""

import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import jax

from jdistgrad.errors import FunctionError
from jdistgrad.rpc import unpickling
from jdistgrad.rpc.functions import describe, lookup, qualified_name

JITTED = type(jax.jit(lambda: None))

REMEDY = (
    "Define it at the top level of a module, or register it on both sides (jdistgrad.register), or open the world with "
    "init(allow_code=True) to send code by value"
)

_portraits: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()


def import_path(function: Any) -> tuple[str, str] | None:
    """Return the module and name under which the other side finds this very function, if any.

    The name is usually the function's own; else another name in its module, as in ``fast = jax.jit(slow)``.
    """
    module, qualname = getattr(function, "__module__", None), qualified_name(function)
    if not module or not qualname:
        return None
    try:
        if lookup(module, qualname) is function:
            return module, qualname
    except (ImportError, AttributeError):
        return None
    name = next((name for name, value in vars(sys.modules[module]).items() if value is function), None)
    return (module, name) if name is not None and portrait(function) is not None else None


def sent_by(path: tuple[str, str], function: Any) -> Any:
    """Return how to pickle a function that the other side finds under a name."""
    return by_name, path if path[1] == qualified_name(function) else (*path, portrait(function))


def by_name(module: str, qualname: str, like: str | None = None) -> Any:
    """Return the function that was sent by this name, and has this portrait.

    Raises:
      FunctionError: it is not here, may not be named, or has another portrait.
    """
    what = f"{module}.{qualname}"
    try:
        found = unpickling.find(module, qualname)
    except (ImportError, AttributeError) as error:
        raise FunctionError(
            f"this worker has no {what} ({error}). Every worker must run the same version of {module}, and define "
            "functions above jd.init(), or a worker may not have come to them yet.",
            function=what,
        ) from error
    if like is not None and portrait(found) != like:
        raise FunctionError(
            f"{what} is another function on this worker ({portrait(found)}) than on the one that sent it ({like}): its "
            "module gives the name to several, in a loop perhaps. Give each function a name of its own.",
            function=what,
        )
    return found


def portrait(function: Any) -> str | None:
    """Return a text that tells a function from others to which its module gives the same name at other times.

    What ``jax.vmap`` and other decorators make of a function has that function's name. None: no text tells it from all
    others, as it holds arrays, say.
    """
    if not isinstance(function, types.FunctionType | JITTED):
        return _drawn(function)
    if function not in _portraits:
        _portraits[function] = _drawn(function)
    return _portraits[function]


def _drawn(function: Any) -> str | None:
    layers, is_jitted = list[str](), isinstance(function, JITTED)
    while function is not None:
        if isinstance(function, types.MethodType) and not is_jitted:
            layers.append(f"a method of {type(function.__self__).__qualname__}{_settings_of(function.__self__)}")
            function = function.__func__
        by_jax, held = _is_made_by_jax(function), _held(function)
        settings = {name: one for name, one in held.items() if _is_setting(one)}
        called = held.get("fun") or next((one for one in held.values() if callable(one)), None)
        others = [one for name, one in held.items() if name not in settings or isinstance(one, list | dict)]
        if not by_jax and any(one is not called for one in others):
            return None
        made_by = getattr(getattr(function, "__code__", None), "co_qualname", type(function).__name__)
        layers.append(f"{made_by}{settings or ''}")
        function = called or inspect.getattr_static(function, "__wrapped__", None)
    return " of ".join(layers)


def _is_found_by_its_name(function: Any) -> bool:
    try:
        return lookup(function.__module__, function.__qualname__) is function
    except (ImportError, AttributeError, TypeError):  # the last for a module of None
        return False


def _is_made_by_jax(function: Any) -> bool:
    made = getattr(function, "__globals__", {}).get("__name__")
    return isinstance(function, types.FunctionType) and str(made).startswith("jax.")


def _held(function: Any) -> dict[str, Any]:
    """Return what a function closes over and its defaults: the axes of ``jax.vmap``, say, and the function it calls."""
    if not isinstance(function, types.FunctionType) or _is_found_by_its_name(function):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed_over = {name: cell.cell_contents for name, cell in cells if name != "docstr"}
    defaults = {f"default {k}": one for k, one in enumerate(function.__defaults__ or ())}
    return closed_over | defaults | (function.__kwdefaults__ or {})


def _settings_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes that a text tells from others. A jitted method is that of each worker's object."""
    found = getattr(value, "__dict__", {})
    return {name: one for name, one in found.items() if not name.startswith("_") and _is_setting(one)}


def _is_setting(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, bool | int | float | complex | str | None) or (
        isinstance(value, tuple | list | dict) and all(map(_is_setting, parts))
    )


def refuse(function: Any) -> FunctionError:
    """Return the error for a function that can be sent neither by name nor by value."""
    what = describe(function)
    return FunctionError(f"{what} cannot be called on another process: {_why_not(what, function)}.", function=what)


def _why_not(what: str, function: Any) -> str:
    try:
        found = lookup(function.__module__, function.__qualname__)
    except Exception:  # a callable object may raise anything when its name is read
        return f"nothing can be imported there under that name. {REMEDY}"
    if isinstance(found, types.FunctionType | JITTED) and not _are_made_of_each_other(found, function):
        return (
            "it has been defined again since, and its name is that of the new one. What holds the old one, such as a "
            "step of jd.jit, a pipeline or an optimizer, has to be made again"
        )
    how = f"this one is made of {what}, as by jax.vmap, and has no name of its own there that tells it from others"
    return f"{how}. {REMEDY}"


def _are_made_of_each_other(one: Any, other: Any) -> bool:
    """Return whether a decorator has made one of two functions of the other, or both of a third."""
    return bool({id(each) for each in _layers(one)} & {id(each) for each in _layers(other)})


def _layers(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = inspect.getattr_static(function, "__wrapped__", None)
