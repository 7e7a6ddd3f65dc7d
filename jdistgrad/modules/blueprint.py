"""Blueprints, from which another worker makes an object again: a function or class both can import, and its arguments.

flax modules hold functions that cannot be pickled (``kernel_init``'s default, for example), so the arguments of their
class travel instead. Blueprints can be compared and hashed, so each worker builds the object of a blueprint only once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jdistgrad.rpc.functions import Args


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A call that makes an object. Arguments may be blueprints themselves."""

    make: Callable[..., Any]
    args: Args = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def build(self) -> Any:
        return self.make(*map(_built, self.args), **{name: _built(value) for name, value in self.kwargs})

    @property
    def label(self) -> str:
        made = self.args[0] if self.make is functools.partial else self.make
        return getattr(made, "__qualname__", None) or type(made).__name__


def blueprint(value: Any, take_apart: Callable[[Any], Blueprint | None]) -> Any:
    """Replace by blueprints all parts of a value that ``take_apart`` or this function knows how to make."""

    def inner(value: Any) -> Any:
        return blueprint(value, take_apart)

    known = take_apart(value)
    if known is not None:
        kwargs = tuple((name, inner(part)) for name, part in known.kwargs)
        return Blueprint(known.make, tuple(map(inner, known.args)), kwargs)
    if isinstance(value, functools.partial):
        kwargs = tuple((name, inner(part)) for name, part in sorted(value.keywords.items()))
        return Blueprint(functools.partial, (value.func, *map(inner, value.args)), kwargs)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return Blueprint(list_of if isinstance(value, list) else tuple_of, tuple(map(inner, value)))
    if isinstance(value, Mapping):
        return Blueprint(dict_of, (tuple_of(*value), *map(inner, value.values())))
    return value


def _built(part: Any) -> Any:
    return part.build() if isinstance(part, Blueprint) else part


def list_of(*items: Any) -> list[Any]:
    return list(items)


def tuple_of(*items: Any) -> tuple[Any, ...]:
    return items


def dict_of(keys: tuple[Any, ...], *values: Any) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))
