"""Names for the leaves of an owner's part of an optimizer, by which they are found again on any owner: pure functions.

An owner's state is that of the list of its values, so a leaf's path in it depends on which values the owner has. Here
the leaf of a value is named by the value's number in the whole optimizer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

Path = tuple[Any, ...]

UNDIVIDED = "state[of "  # begins the names of a state of which optax cannot tell what belongs to which value


@dataclasses.dataclass(frozen=True)
class Name:
    """The name of a state's leaf. ``number``: of the value it belongs to; None: it belongs to all of the owner's."""

    text: str
    number: int | None


@dataclasses.dataclass(frozen=True)
class _Label:
    number: int
    path: Path


@dataclasses.dataclass(frozen=True)
class _OfAll:
    pass


def names_in(tx: optax.GradientTransformation, state: Any, values: Sequence[Any], numbers: Sequence[int]) -> list[Name]:
    """Return a name for each leaf of an owner's state, in JAX's order.

    Arguments:
      values: the trees of the owner's values, without what is not optimized.
      numbers: their numbers in the optimizer.
    """
    labels = [
        jax.tree_util.tree_map_with_path(lambda path, _, number=number: _Label(number, path), value)
        for number, value in zip(numbers, values, strict=True)
    ]
    try:
        marked = optax.tree_map_params(
            tx, _label, state, labels, transform_non_params=lambda _: _OfAll(), is_leaf=_is_masked
        )
        found = jax.tree_util.tree_flatten_with_path(marked)[0]
    except Exception:  # optax cannot tell where the parameters are in every user's state
        found = []
    if len(found) != len(jax.tree.leaves(state)):
        begin = f"{UNDIVIDED}{', '.join(map(str, numbers))}]"  # fits only an owner of the same values
        paths = jax.tree_util.tree_flatten_with_path(state)[0]
        return [Name(f"{begin}{jax.tree_util.keystr(path)}", None) for path, _ in paths]
    return [_named(path, label) for path, label in found]


def _label(leaf: Any, label: _Label) -> Any:
    return leaf if _is_masked(leaf) else label


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _named(path: Path, label: Any) -> Name:
    if not isinstance(label, _Label):
        return Name(f"state{jax.tree_util.keystr(path)}", None)
    before = path[: len(path) - len(label.path) - 1]  # then comes the value's place among the owner's
    spelled = f"{jax.tree_util.keystr(before)}[{label.number}]{jax.tree_util.keystr(label.path)}"
    return Name(f"state{spelled}", label.number)
