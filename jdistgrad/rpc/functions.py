"""The functions that may be called: what describes one, and those that both sides registered under a name."""

import types
from collections.abc import Callable
from typing import Any, TypeVar

from jdistgrad import events
from jdistgrad.errors import FunctionError
from jdistgrad.rpc import programs

ALIKE = ("builtins", "jax", "jaxlib", "jdistgrad", "ml_dtypes", "numpy")  # packages whose equal values are alike

Args = tuple[Any, ...]  # of a call
Kwargs = dict[str, Any]

F = TypeVar("F", bound=Callable[..., Any] | types.ModuleType)
C = TypeVar("C", bound=Callable[..., Any])

_by_name: dict[str, Callable[..., Any]] = {}
_names: dict[int, str] = {}
_shown: dict[int, str] = {}


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
    found = programs.imported(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
