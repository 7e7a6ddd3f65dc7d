"""Which functions may be called: importable ones, by name, and those that both sides registered."""

import pickle
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from jdistgrad import events
from jdistgrad.errors import FunctionError

F = TypeVar("F", bound=Callable[..., Any])

_by_name: dict[str, Callable[..., Any]] = {}
_names: dict[int, str] = {}


class ServedFunction:
    """A function made by this package, of which the serving worker knows more than of a user's.

    A base class and not a set of attributes: a user's callable object may have fields of any name.

    Attributes:
      takes_references: whether references among its arguments stay references, instead of becoming their values.
      pure: whether it may be compiled, called less often than the program says, or called again.
    """

    takes_references = False
    pure = False

    @property
    def label(self) -> str:
        """Its name, for people."""
        return type(self).__name__

    @property
    def served_as(self) -> str:
        """The kind of event that serving it is."""
        return events.SERVE

    @property
    def recorded_as(self) -> int | None:
        """The id under which a context knows what it records or pulls, if it does."""
        return None

    def failed(self, error: BaseException) -> None:
        """Called with what it, or reading its arguments, raised."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def register(function: F, name: str | None = None) -> F:
    """Make a function callable from other workers although it cannot be imported: a closure, say.

    Every worker that calls it or is called must register its own copy under the same name.

    Arguments:
      function: any callable.
      name: what both sides call it; by default its module and qualified name.

    Returns:
      The function, so that it serves as a decorator.

    Example:
      >>> def make(scale):
      ...     def scaled(x):
      ...         return scale * x
      ...     return jd.register(scaled, name=f"scaled-{scale}")
      >>> double = make(2)
    """
    key = name or describe(function)
    _by_name[key] = function
    _names[id(function)] = key
    return function


def registered_name(function: Any) -> str | None:
    """The name a function is registered under: the latest, if no other has taken that name since."""
    name = _names.get(id(function))
    return name if name is not None and _by_name[name] is function else None


def registered(name: str) -> Callable[..., Any]:
    """The function registered under a name; how the callee finds it."""
    if name not in _by_name:
        raise FunctionError(
            f"no function is registered as {name!r} on this worker. Call jdistgrad.register(function, {name!r}) "
            "on every worker that is to run it.",
            function=name,
        )
    return _by_name[name]


def qualified_name(function: Any) -> str | None:
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None)


def describe(function: Any) -> str:
    """A function's name for messages: module and qualified name; or the label of one that is made of others."""
    if isinstance(function, ServedFunction):
        return function.label
    try:
        name = qualified_name(function)
        if name is not None:
            return f"{getattr(function, '__module__', None) or 'builtins'}.{name}"
    except Exception:  # an object that is called may answer anything when it is asked for a name
        return type(function).__name__
    return type(function).__name__


def lookup(module: str, qualname: str) -> Any:
    """The object a module holds under a dotted name. ImportError or AttributeError where there is none."""
    if module not in sys.modules:
        __import__(module)
    found = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def import_path(function: Any) -> tuple[str, str] | None:
    """The module and name under which the other side finds this very function, if any.

    Its own name as a rule; else another name its module has for it, as in ``fast = jax.jit(slow)``.
    """
    module, qualname = getattr(function, "__module__", None), qualified_name(function)
    if not module or not qualname:
        return None
    try:
        if lookup(module, qualname) is function:
            return module, qualname
    except (ImportError, AttributeError):
        return None
    return next(((module, name) for name, value in vars(sys.modules[module]).items() if value is function), None)


def by_name(module: str, qualname: str) -> Any:
    """What a function sent by name becomes on arrival."""
    try:
        return lookup(module, qualname)
    except (ImportError, AttributeError) as error:
        raise FunctionError(
            f"this worker has no {module}.{qualname} ({error}). Every worker must run the same version of {module}.",
            function=f"{module}.{qualname}",
        ) from error


def own_or_sent(module: str, qualname: str, code: bytes | None) -> Any:
    """What a class sent by value becomes on arrival: the class of that name here, if there is one.

    What JAX knows of a class, and who catches an exception, depends on the very class.
    """
    try:
        found = lookup(module, qualname)
    except (ImportError, AttributeError):
        found = None
    if isinstance(found, type) or code is None:
        return found if isinstance(found, type) else by_name(module, qualname)
    return pickle.loads(code)


def refuse(function: Any) -> FunctionError:
    """The error for a function that can be sent neither by name nor by value."""
    return FunctionError(
        f"{describe(function)} cannot be called on another process: nothing can be imported there under that name. "
        "Define it at the top level of a module, or register it on both sides (jdistgrad.register), or open the "
        "world with init(allow_code=True) to send code by value.",
        function=describe(function),
    )
