"""Functions in calls: their names for messages, and functions that both sides registered under a name."""

import contextlib
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jdistgrad import events
from jdistgrad.errors import FunctionError

JITTED = type(jax.jit(lambda: None))

Args = tuple[Any, ...]  # of a call
Kwargs = dict[str, Any]

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


def register(function: C, name: str | None = None) -> C:
    """Let a function travel under a name: every worker that calls or runs it registers its own copy.

    Arguments:
      function: any callable.
      name: the name on all workers; defaults to the function's module and qualified name.

    Returns:
      The function, so that ``register`` serves as a decorator.

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


def describe(function: Any) -> str:
    """Return a function's name for messages: module and qualified name, or what one of jdistgrad's own is shown as."""
    if isinstance(function, ServedFunction):
        return function.label
    if id(function) in _shown:
        return _shown[id(function)]
    with contextlib.suppress(Exception):  # a callable object may raise anything when its name is read
        name = qualified_name(function)
        if name is not None:
            return f"{getattr(function, '__module__', None) or 'builtins'}.{name}"
    return type(function).__name__


def import_path(function: Any) -> tuple[str, str] | None:
    """Return the module and name that lead back to this very function or class, if they do."""
    module: Any = getattr(function, "__module__", None)
    qualname: Any = qualified_name(function)
    try:
        found = operator.attrgetter(qualname)(sys.modules[module])
    except (AttributeError, KeyError, TypeError):
        return None
    return (module, qualname) if found is function else None


def lookup(module: str, qualname: str) -> Any:
    """Return what a module holds under a dotted name. Raises ImportError or AttributeError if there is none.

    A module is in ``sys.modules`` as soon as its import has begun: only ``__import__`` waits for another thread's.
    """
    __import__(module)
    return operator.attrgetter(qualname)(sys.modules[module])
