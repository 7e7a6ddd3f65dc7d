"""The functions that may be called: importable functions, by name, and functions that both sides registered."""

import contextlib
import inspect
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jdistgrad import events
from jdistgrad.errors import FunctionError
from jdistgrad.rpc import programs, unpickling

JITTED = type(jax.jit(lambda: None))
ALIKE = ("builtins", "jax", "jaxlib", "jdistgrad", "ml_dtypes", "numpy")  # packages whose equal values are alike

Args = tuple[Any, ...]  # of a call
Kwargs = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any] | types.ModuleType)
C = TypeVar("C", bound=Callable[..., Any])

_by_name: dict[str, Callable[..., Any]] = {}
_names: dict[int, str] = {}
_shown: dict[int, str] = {}
_portraits: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()


class ServedFunction:
    """A function made by this package, with properties that the serving worker needs.

    This is a base class, not a set of attributes, because a user's callable object may have attributes of any name.

    Attributes:
      takes_references: whether references among the arguments stay references, instead of becoming their values.
      pure: whether the function may be compiled, called less often than the program says, or called again.
      state_argument: the number of the argument that refers to state which the function reads and changes, if any.
    """

    takes_references = False
    pure = False
    state_argument: int | None = None

    @property
    def label(self) -> str:
        """Return the function's name, for people to read."""
        return type(self).__name__

    @property
    def served_as(self) -> str:
        """Return the kind of the timeline event for serving the function."""
        return events.SERVE

    @property
    def recorded_as(self) -> int | None:
        """Return the id under which a context knows the function's recording or pullback, if it has one."""
        return None

    @property
    def same_arguments_as(self) -> Any:
        """Return the function that this one calls with its own arguments, or None."""
        return None

    def failed(self, error: BaseException) -> None:
        """Handle an exception raised by the function, or while its arguments were read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def shown_as(what: str) -> Callable[[C], C]:
    """Say what calls of one of jdistgrad's own functions do, for messages: its name says nothing to users."""

    def note(function: C) -> C:
        _shown[id(function)] = what
        return function

    return note


def register(function: F, name: str | None = None) -> F:
    """Let other workers call a function that cannot be imported, or that messages may not name; or use a module.

    Every worker that calls or runs the function must register its own copy under the same name. A module is registered
    with all that it and the modules below it define: an installed package, say, whose functions and classes are sent.

    Arguments:
      function: any callable, or a module.
      name: the name on all workers; defaults to the function's module and qualified name. Modules have their own.

    Returns:
      The function, so that ``register`` serves as a decorator.

    Example:
      >>> def make(scale):
      ...     def scaled(x):
      ...         return scale * x
      ...     return jd.register(scaled, name=f"scaled-{scale}")
      >>> double = make(2)
    """
    if isinstance(function, types.ModuleType):
        if name is not None:
            raise TypeError(f"register: {function.__name__} is a module, which has no other name: not {name!r}")
        programs.register(function.__name__)
        return function
    key = name or describe(function)
    _by_name[key] = function
    _names[id(function)] = key
    return function


def registered_name(function: Any) -> str | None:
    """Return the latest name a function was registered under, unless another function has taken that name since."""
    name = _names.get(id(function))
    return name if name is not None and _by_name[name] is function else None


def registered(name: str) -> Callable[..., Any]:
    """Return the function registered under a name. The callee decodes registered functions by this."""
    if name not in _by_name:
        raise FunctionError(
            f"no function is registered as {name!r} on this worker. Call jdistgrad.register(function, {name!r}) "
            "on every worker that is to run it.",
            function=name,
        )
    return _by_name[name]


def qualified_name(function: Any) -> str | None:
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None)


def equals_only_alike(value: Any) -> bool:
    """Return whether what equals a value is like it: users' classes may leave out of comparisons what matters here."""
    kind: Any = type(value)
    return kind.__eq__ is object.__eq__ or kind.__module__.partition(".")[0] in ALIKE


def content_of(value: Any) -> Any:
    """Return what tells a value from equal ones: its type, and all that it holds if a user's class defines equality."""
    kind = type(value)
    if equals_only_alike(value):
        return kind
    try:
        return kind, pickle.dumps(value)
    except Exception:  # whatever the reason: what it holds cannot be compared
        return kind, id(value)


def describe(function: Any) -> str:
    """Return a function's name for messages: module and qualified name, or what one of jdistgrad's own is shown as."""
    if isinstance(function, ServedFunction):
        return function.label
    if id(function) in _shown:
        return _shown[id(function)]
    try:
        name = qualified_name(function)
        if name is not None:
            return described(getattr(function, "__module__", None), name)
    except Exception:  # a callable object may raise anything when its name is read
        return type(function).__name__
    return type(function).__name__


def described(module: str | None, qualname: str) -> str:
    return f"{module or 'builtins'}.{qualname}"


def lookup(module: str, qualname: str) -> Any:
    """Return the object a module holds under a dotted name. Raises ImportError or AttributeError if there is none."""
    if module not in sys.modules:
        __import__(module)
    found = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


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


def refuse(function: Any) -> FunctionError:
    """Return the error for a function that can be sent neither by name nor by value."""
    what = describe(function)
    why = "nothing can be imported there under that name"
    with contextlib.suppress(Exception):  # a callable object may raise anything when its name is read
        lookup(function.__module__, function.__qualname__)
        why = f"this one is made of {what}, as by jax.vmap, and has no name of its own there that tells it from others"
    return FunctionError(
        f"{what} cannot be called on another process: {why}. Define it at the top level of a module, or register it on "
        "both sides (jdistgrad.register), or open the world with init(allow_code=True) to send code by value.",
        function=what,
    )
