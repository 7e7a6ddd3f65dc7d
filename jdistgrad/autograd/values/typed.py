"""Arrays whose type is more than a dtype: weakly typed ones, which JAX treats as Python numbers, and random keys.

Host callbacks of compiled code get plain arrays, of NumPy. So traced arguments are sent as plain arrays, and the callee
restores their types before it calls the function: a function that runs as written gets the arrays of JAX for which it
is written. Operators of NumPy's arrays give other dtypes, and change arrays in place.
"""

import dataclasses
import weakref
from typing import Any, ClassVar

import jax

from jdistgrad._compat import weakly_typed
from jdistgrad.autograd.values.holes import is_key
from jdistgrad.rpc import trees
from jdistgrad.rpc.fingerprints import equals_only_alike
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.wire.arrays import as_jax_array

WEAK, ARRAY = "weak", "array"

# By the paths of leaves: WEAK, ARRAY for other arrays of JAX, or the implementation of a random key.
Types = tuple[tuple[tuple[int, ...], str], ...]


@dataclasses.dataclass(frozen=True)
class MadeOf(ServedFunction):
    """A function made of another one. ``title``: its label, with the other one's in place of the braces."""

    function: Any
    title: ClassVar[str] = "{}"

    @property
    def label(self) -> str:
        return self.title.format(describe(self.function))


@dataclasses.dataclass(frozen=True)
class Around(MadeOf):
    """A function around another one, which it calls with its own arguments."""

    @property
    def same_arguments_as(self) -> Any:
        return self.function


@dataclasses.dataclass(frozen=True)
class Typed(Around):
    """A function called with plain arrays; it restores their original types first."""

    types: Types

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        types, paths = dict(self.types), trees.paths((args, kwargs))

        def restore(leaf: Any) -> Any:
            kind = types.get(next(paths))
            if kind is None:
                return leaf
            if kind in (WEAK, ARRAY):
                return weakly_typed(leaf) if kind == WEAK else as_jax_array(leaf)
            return jax.random.wrap_key_data(leaf, impl=kind)

        args, kwargs = trees.map_leaves(restore, (args, kwargs))
        return self.function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return typed, (self.function, self.types)


# Those that somebody holds, such as compiled code. A function may hold a batch: nothing else may keep it alive.
_known: "weakref.WeakValueDictionary[tuple[Any, Types], Typed]" = weakref.WeakValueDictionary()


def typed(function: Any, types: Types) -> Typed:
    """Return the same Typed for the same function and types: compiled code is cached by the functions that it has."""
    called, made = function, Typed(function, types)
    while isinstance(called, ServedFunction) and hasattr(called, "function"):
        called = called.function
    try:
        return _known.setdefault((function, types), made) if equals_only_alike(called) else made
    except TypeError:  # a function that cannot be hashed
        return made


def plain(function: Any, args: Any, kwargs: Any, *, arrays: bool) -> tuple[Any, Any, Any]:
    """Turn the arguments of a traced call into plain arrays, and its function into one that restores their types.

    Arguments:
      arrays: whether the function needs arrays of JAX. Compiled ones make them faster themselves.
    """
    types, paths = list[tuple[tuple[int, ...], str]](), trees.paths((args, kwargs))

    def change(leaf: Any) -> Any:
        path, traced = next(paths), isinstance(leaf, jax.core.Tracer)
        if is_key(leaf):
            types.append((path, str(jax.random.key_impl(leaf))))
            return jax.random.key_data(leaf)
        if traced and getattr(leaf, "weak_type", False):
            types.append((path, WEAK))
        elif traced and arrays:
            types.append((path, ARRAY))
        return leaf

    args, kwargs = trees.map_leaves(change, (args, kwargs))
    return typed(function, tuple(types)) if types else function, args, kwargs
