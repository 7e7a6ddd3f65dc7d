"""Errors for what users of other libraries try first, with what to do here instead.

Type checkers must not see these methods: they would believe that every attribute and operator exists.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
}  # fmt: skip
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}


# What objects of users have for this package only: completion leaves it out.
INTERNAL = {
    "apply", "checked_scope", "corrections", "handle", "identified", "lease", "marks", "scope", "tape", "token",
    "traced_part", "value_future",
}  # fmt: skip


def _used_by_users(owner: Any) -> list[str]:
    """Return the names that completion shows of an object."""
    return [name for name in object.__dir__(owner) if name not in INTERNAL]


def _not_here(stand_in: Any, what: str) -> str:
    return (
        f"{stand_in} is not the value itself: it has no {what}. Use the value where it is, "
        f"jd.rpc_sync({stand_in.owner.name!r}, function, args=(reference,)), or a copy of it, reference.to_here()."
    )


def _not_yet(stand_in: Any, what: str) -> str:
    return (
        f"a {type(stand_in).__name__} is not the value itself: it has no {what}. result() waits and returns the value."
    )


if TYPE_CHECKING:

    class Corrected:
        """An object with ``corrections``: names that other libraries have, and what to use here instead."""

        corrections: ClassVar[Mapping[str, str]]

    class Later:
        """An object that stands for a value that comes later."""

    class Elsewhere:
        """An object that stands for a value on another worker."""

        owner: Any

else:

    class Corrected:
        """An object with ``corrections``: names that other libraries have, and what to use here instead."""

        corrections: ClassVar[Mapping[str, str]] = {}
        __dir__ = _used_by_users

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            hint = self.corrections.get(name)
            raise AttributeError(f"a {kind} has no {name!r}{f': {hint}.' if hint else '.'}", name=name, obj=self)

    class Elsewhere:
        """An object that stands for a value on another worker: it has neither the value's attributes nor operators."""

        __slots__ = ()
        __array_ufunc__ = None  # NumPy leaves operators to this class
        __dir__ = _used_by_users

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise AttributeError(_not_here(self, f"attribute {name!r}"), name=name, obj=self)

        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(_not_here(self, "array form"))

        def __getitem__(self, key: Any) -> Any:
            raise TypeError(_not_here(self, f"item [{key!r}]"))

        def __len__(self) -> int:
            raise TypeError(_not_here(self, "length"))

        def __bool__(self) -> bool:  # Python would ask for the length
            return True

        def __float__(self) -> float:
            raise TypeError(_not_here(self, "numeric form"))

    class Later:
        """An object that stands for a value that comes later: it has none of the value's operators."""

        __slots__ = ()
        __array_ufunc__ = None

        def __getitem__(self, key: Any) -> Any:
            raise TypeError(_not_yet(self, f"item [{key!r}]"))

    def _refusing(explain: Callable[[Any, str], str], symbol: str) -> Callable[..., Any]:
        def refuse(self: Any, *others: Any) -> Any:
            raise TypeError(explain(self, f"operator {symbol}"))

        return refuse

    for _name, _symbol in {**OPERATORS, **COMPARISONS, "neg": "-", "abs": "abs"}.items():
        assert hasattr(operator, f"__{_name}__")
        for _kind, _explain in ((Elsewhere, _not_here), (Later, _not_yet)):
            setattr(_kind, f"__{_name}__", _refusing(_explain, _symbol))
            if _name in OPERATORS:
                setattr(_kind, f"__r{_name}__", _refusing(_explain, _symbol))


def needing_arguments(what: str) -> Callable[[F], F]:
    """Return a decorator of a method that is not called without arguments; the error then says ``what`` it takes."""

    def decorated(method: Any) -> Any:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and not kwargs:
                raise TypeError(what)
            return method(self, *args, **kwargs)

        return call

    return decorated
