"""Fingerprints of values, in the keys of caches of compiled functions."""

import hashlib
import pickle
import types
from typing import Any

import jax

ALIKE = ("builtins", "jax", "jaxlib", "jdistgrad", "ml_dtypes", "numpy")  # packages whose equal values are alike

FOUND_BY_NAME = types.FunctionType | types.BuiltinFunctionType | type | types.ModuleType | type(jax.jit(abs))


def fingerprint(value: Any) -> Any:
    """Return a key that differs when an equal value has another type or content, or when the value is mutated.

    For a method, the key of its object. For objects that are not of a user's class, the type alone.
    """
    if isinstance(value, types.MethodType):
        return fingerprint(value.__self__)
    kind = type(value)
    if kind.__module__.partition(".")[0] in ALIKE:
        return kind
    content = Content()
    try:
        content.dump(value)
    except Exception:  # the content cannot be compared, and may have changed
        return kind, object()
    return kind, content.digest.digest(), tuple(content.functions.values())


def equals_only_alike(value: Any) -> bool:
    """Return whether equal values are interchangeable: the ``__eq__`` of users' classes may ignore attributes."""
    kind: Any = type(value)
    return kind.__eq__ is object.__eq__ or kind.__module__.partition(".")[0] in ALIKE


class Content(pickle.Pickler):
    """A digest of a value's pickle: keys are kept for long, and values may be large.

    Attributes:
      functions: the functions and classes in the value, by id. A pickle has their names only, which others may take.
    """

    def __init__(self) -> None:
        self.digest, self.functions = hashlib.blake2b(), dict[int, Any]()
        super().__init__(types.SimpleNamespace(write=self.digest.update))

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number that stands for a function in the digest. None for other objects, which are pickled."""
        if not isinstance(obj, FOUND_BY_NAME):
            return None
        self.functions.setdefault(id(obj), obj)
        return [*self.functions].index(id(obj))
