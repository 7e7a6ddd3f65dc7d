"""The static parts of a tree, on which the ranks must agree: what its nodes hold beside their leaves.

Such as the activation of a module or its dropout rate. JAX compiles them into the program, and gradients of different
programs have the same shapes.
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jdistgrad.data_parallel.buckets.functions import Enclosed

CONTAINERS = (dict, list, tuple, collections.OrderedDict, collections.defaultdict, type(None))
PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


def static_parts(structure: Any) -> tuple[str, ...]:
    """Spell the static parts of a tree's structure, in order, such that equal parts are spelled alike in every process.

    Of a part that has no such spelling, the type is given. Keys are left out: paths of leaves have them.
    """
    return tuple(_of_nodes(structure))


def _of_nodes(structure: Any) -> Iterator[str]:
    node = structure.node_data()
    if node is None:  # a leaf
        return
    kind, fixed = node
    if kind is Enclosed:
        yield _spelled(fixed.function)
    elif kind not in CONTAINERS:
        yield f"{kind.__qualname__}: {_spelled(fixed)}"
    for child in structure.children():
        yield from _of_nodes(child)


def _spelled(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_spelled, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_spelled, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_spelled(key)}: {_spelled(one)}' for key, one in value.items())}}}"
    if isinstance(value, functools.partial):
        return f"partial({_spelled((value.func, value.args, value.keywords))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}{_spelled([getattr(value, one.name) for one in dataclasses.fields(value)])}"
    if hasattr(value, "__qualname__"):  # a function or a type
        return f"{value.__module__}.{value.__qualname__}"
    return str(value) if isinstance(value, np.dtype) else type(value).__qualname__
