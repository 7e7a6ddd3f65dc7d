"""Arrays whose type is more than a dtype: weak ones, which are Python's numbers to JAX, and random keys.

Compiled code hands out plain numbers. So traced arguments cross as these, and the function is told what they were.
"""

import dataclasses
import functools
from typing import Any

import jax

from jdistgrad._compat import weakly_typed
from jdistgrad.autograd.values.holes import arrays_of, is_key
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import ServedFunction, describe

WEAK = "weak"

Types = tuple[tuple[tuple[int, ...], str], ...]  # by paths of leaves: WEAK, or which kind of random key


@dataclasses.dataclass(frozen=True)
class Typed(ServedFunction):
    """A function of plain arrays, which it is given as what they were."""

    function: Any
    types: Types

    @property
    def label(self) -> str:
        return describe(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        types, paths = dict(self.types), trees.paths((args, kwargs))
        args, kwargs = trees.map_leaves(lambda leaf: _as(types.get(next(paths)), leaf), (args, kwargs))
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return typed, (self.function, self.types)


def _as(kind: str | None, leaf: Any) -> Any:
    if kind is None:
        return leaf
    return weakly_typed(leaf) if kind == WEAK else jax.random.wrap_key_data(leaf, impl=kind)


_typed = functools.lru_cache(maxsize=1024)(Typed)


def typed(function: Any, types: Types) -> Typed:
    """The same object each time: what is compiled is found by its functions."""
    try:
        return _typed(function, types)
    except TypeError:  # a function that cannot be hashed
        return Typed(function, types)


def plain(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call of which JAX traces something, with plain arrays as its arguments."""
    types, paths = list[tuple[tuple[int, ...], str]](), trees.paths((args, kwargs))

    def change(leaf: Any) -> Any:
        kind, path = _kind(leaf), next(paths)
        if kind is not None:
            types.append((path, kind))
        return leaf if kind in (None, WEAK) else jax.random.key_data(leaf)

    args, kwargs = trees.map_leaves(change, (args, kwargs))
    return typed(function, tuple(types)) if types else function, args, kwargs


def _kind(leaf: Any) -> str | None:
    if is_key(leaf):
        return str(jax.random.key_impl(leaf))
    return WEAK if isinstance(leaf, jax.core.Tracer) and getattr(leaf, "weak_type", False) else None


@dataclasses.dataclass(frozen=True)
class ArraysOf(ServedFunction):
    """A function that returns the arrays of its result alone, and random keys among them as numbers."""

    function: Any

    @property
    def label(self) -> str:
        return describe(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return arrays_of(self.function(*args, **kwargs))
