"""Errors for what users of other libraries try first, with what to do here instead.

Type checkers must not see these methods: they would believe that every attribute and operator exists.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


# What objects of users have for this package only: completion leaves it out.
INTERNAL = {
    "apply", "checked_scope", "claim", "corrections", "handle", "home", "identified", "lease", "marks", "of", "scope",
    "shares", "tape", "token", "traced_part", "value_future",
}  # fmt: skip


def _used_by_users(owner: Any) -> list[str]:
    """Return the names that completion shows of an object."""
    return [name for name in object.__dir__(owner) if name not in INTERNAL]


class Corrected:
    """An object with ``corrections``: names that other libraries have, and what to use here instead."""

    corrections: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:
        __dir__ = _used_by_users

        def __getattr__(self, name: str) -> Any:
            hint = self.corrections.get(name)
            text = f"a {type(self).__name__} has no {name!r}{f': {hint}.' if hint else '.'}"
            raise AttributeError(text, name=name, obj=self)


class Later:
    """An object that stands for a value that comes later: it has none of the value's operators."""

    if not TYPE_CHECKING:
        __slots__ = ()
        __array_ufunc__ = None  # NumPy leaves operators to this class

        def _without(self, what: str) -> str:
            kind = type(self).__name__
            return f"a {kind} is not the value itself: it has no {what}. result() waits and returns the value."

        def __getitem__(self, key: Any) -> Any:
            raise TypeError(self._without(f"item [{key!r}]"))


class Elsewhere(Later):
    """An object that stands for a value on another worker: it has neither the value's attributes nor operators."""

    owner: Any

    if not TYPE_CHECKING:
        __slots__ = ()
        __dir__ = _used_by_users

        def _without(self, what: str) -> str:
            return (
                f"{self} is not the value itself: it has no {what}. Use the value where it is, "
                f"jd.on({self.owner.name!r}, function)(reference), or a copy of it, reference.to_here()."
            )

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(
                text if name.startswith("_") else self._without(f"attribute {name!r}"), name=name, obj=self
            )

        def __bool__(self) -> bool:  # Python would ask for the length
            return True


def _refuse_in(kind: type, method: str, what: str) -> None:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise TypeError(self._without(what))

    setattr(kind, f"__{method}__", refuse)


for _name, _symbol in {**OPERATORS, **COMPARISONS, "neg": "-", "abs": "abs"}.items():
    _refuse_in(Later, _name, f"operator {_symbol}")
    if _name in OPERATORS:
        _refuse_in(Later, f"r{_name}", f"operator {_symbol}")
for _name, _what in {"array": "array form", "len": "length", "float": "numeric form"}.items():
    _refuse_in(Elsewhere, _name, _what)
