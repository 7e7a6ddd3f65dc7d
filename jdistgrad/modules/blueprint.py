"""Blueprints, from which another worker makes an object again: a function or class both can import, and its arguments.

flax modules hold functions that cannot be pickled (``kernel_init``'s default, for example), so the arguments of their
class travel instead. Blueprints can be compared and hashed, so each worker builds the object of a blueprint only once.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any

from jdistgrad.rpc.by_value import code_of, from_code
from jdistgrad.rpc.fingerprints import fingerprint
from jdistgrad.rpc.functions import Args, describe, import_path, registered_name


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A call that makes an object. Arguments may be blueprints themselves.

    Equal arguments may make different objects: ``Power(2)`` returns integers, ``Power(2.0)`` floats, and a class may
    leave out of its comparisons what matters here.
    """

    make: Callable[..., Any]
    args: Args = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    typed: tuple[Any, ...] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = *self.args, *(value for _, value in self.kwargs)
        object.__setattr__(self, "typed", tuple(map(fingerprint, values)))

    def __reduce__(self) -> Any:
        return Blueprint, (self.make, self.args, self.kwargs)  # there, fingerprints are others

    @property
    def label(self) -> str:
        if self.make is from_code:
            return describe(built(self))
        made = self.args[0] if self.make is functools.partial else self.make
        return getattr(made, "__qualname__", None) or type(made).__name__


@dataclasses.dataclass(frozen=True)
class Again:
    """The same object as one that the blueprint has made before: flax shares the parameters of a module used twice.

    Attributes:
      number: how many objects were made before that one.
    """

    number: int


def blueprint(value: Any, take_apart: Callable[[Any], Blueprint | None]) -> Any:
    """Replace by blueprints all parts of a value that ``take_apart`` or this function knows how to make."""
    count = itertools.count()
    numbers: dict[int, int] = {}

    def inner(value: Any) -> Any:
        if id(value) in numbers:
            return Again(numbers[id(value)])
        known = take_apart(value)
        call = _call_for(value) if known is None else known
        if call is None:
            return value
        args = tuple(map(inner, call.args))  # before the others, as they are made
        made = Blueprint(call.make, args, tuple((name, inner(part)) for name, part in call.kwargs))
        number = next(count)
        if known is not None:
            numbers[id(value)] = number
        return made

    return inner(value)


def _call_for(value: Any) -> Blueprint | None:
    """Return the call that makes a value of Python's own types, whose parts may have blueprints. None for others.

    A function that another one has made, as ``nn.initializers.normal(0.02)``, has no name by which it could be found.
    """
    if isinstance(value, types.FunctionType) and import_path(value) is None and registered_name(value) is None:
        code = code_of(value)
        return None if code is None else Blueprint(from_code, (code,))
    if isinstance(value, functools.partial):
        return Blueprint(functools.partial, (value.func, *value.args), tuple(sorted(value.keywords.items())))
    if isinstance(value, list):
        return Blueprint(list, (tuple(value),))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return Blueprint(tuple_of, value)
    if isinstance(value, set):
        return Blueprint(set, (frozenset(value),))
    if isinstance(value, Mapping):
        return Blueprint(dict, (tuple(value.items()),))
    return None


def built(part: Any, made: list[Any] | None = None) -> Any:
    """Return an object, made or found again; add what was made to ``made``, in the order of ``Again.number``."""
    made = [] if made is None else made
    if isinstance(part, Again):
        return made[part.number]
    if not isinstance(part, Blueprint):
        return part
    args = [built(one, made) for one in part.args]
    made.append(part.make(*args, **{name: built(one, made) for name, one in part.kwargs}))
    return made[-1]


def tuple_of(*items: Any) -> tuple[Any, ...]:
    return items
