"""Settings: what parameters hold beside arrays and numbers, such as the functions and flags of an equinox module.

They are a part of what is compiled, as arguments of calls are that are no arrays.
"""

import dataclasses
from typing import Any

import jax

from jdistgrad.autograd.values.holes import can_be_traced
from jdistgrad.rpc.fingerprints import fingerprint


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    """A leaf that JAX cannot trace, or a flag, as a node without leaves. ``key`` tells it from others."""

    key: tuple[Any, ...]
    value: Any = dataclasses.field(compare=False)


def with_settings(parameters: Any) -> Any:
    """Return parameters with settings in place of functions, texts and flags.

    Raises:
      TypeError: one of them has no hash, by which what is compiled for it could be found.
    """
    if not any(map(_is_fixed, jax.tree.leaves(parameters))):
        return parameters
    return jax.tree_util.tree_map_with_path(_setting, parameters)


def without_settings(parameters: Any) -> Any:
    """Return the parameters that ``with_settings`` was given."""
    return jax.tree.map(lambda leaf: leaf.value if _is_setting(leaf) else leaf, parameters, is_leaf=_is_setting)


def _is_fixed(leaf: Any) -> bool:
    return isinstance(leaf, bool) or not can_be_traced(leaf)


def _is_setting(leaf: Any) -> bool:
    return isinstance(leaf, Setting)


def _setting(path: Any, leaf: Any) -> Any:
    if not _is_fixed(leaf):
        return leaf
    key = _key(leaf)
    try:
        hash(key)
    except TypeError:
        where = f" at {jax.tree_util.keystr(path)}" if path else ""
        text = f"the parameters hold {leaf!r:.60}{where}: expected arrays, numbers, and what has a hash"
        raise TypeError(text) from None
    return Setting(key, leaf)


def _key(value: Any) -> tuple[Any, ...]:
    """Return what tells a value from others: equal ones may be of different types.

    A partial function equals no other. One that comes with the parameters in every step is told by what it holds.
    """
    kind: Any = type(value)
    content = fingerprint(value)
    is_told = kind.__eq__ is object.__eq__ and isinstance(content, tuple) and len(content) > 2
    return content if is_told else (kind, value)
