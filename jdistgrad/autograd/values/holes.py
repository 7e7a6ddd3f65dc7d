"""Trees with holes: which parts of a call's arguments or results are arrays JAX may trace, and all the rest."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.rpc import trees
from jdistgrad.rpc.references.methods import ByReference
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.traced_hook import is_traced, staging


class Hole:
    """Where an array goes."""

    def refill(self, operands: Iterator[Any]) -> Any:
        return next(operands)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyHole(Hole):
    """Where random keys go, of which the operand is the data."""

    impl: str

    def refill(self, operands: Iterator[Any]) -> Any:
        return jax.random.wrap_key_data(next(operands), impl=self.impl)


@dataclasses.dataclass(frozen=True, eq=False)
class ReferenceHole:
    """Where a reference goes that has operands.

    ``kept`` keeps the value alive for backward passes. Staged code has only its key: JAX keeps that for ever.
    """

    structure: Any
    wraps: int
    kept: Any

    @property
    def width(self) -> int:
        return self.structure.num_leaves

    def refill(self, operands: Iterator[Any]) -> Any:
        children = [next(operands) for _ in range(self.width)]
        filled = jax.tree.unflatten(self.structure, children)
        for _ in range(self.wraps):
            filled = ByReference(filled)
        return filled


@dataclasses.dataclass(frozen=True)
class Operand:
    """What goes into a hole: an operand, or a reference made of several. ``numbers``: which ones."""

    hole: "Hole | ReferenceHole"
    numbers: tuple[int, ...]

    def of(self, operands: Sequence[Any]) -> Any:
        if isinstance(self.hole, Hole):
            return operands[self.numbers[0]]
        return self.hole.refill(operands[k] for k in self.numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A tree whose picked leaves are holes; ``positions``: for each operand, the number of the leaf it is of."""

    tree: Any
    positions: tuple[int, ...]

    def fill(self, operands: Iterable[Any]) -> Any:
        """The tree with operands in its holes."""
        rest = iter(operands)

        def refill(leaf: Any) -> Any:
            return leaf.refill(rest) if isinstance(leaf, Hole | ReferenceHole) else leaf

        return trees.map_leaves(refill, self.tree)

    def emptied(self) -> "Layout":
        """The tree with holes for everything that is sent anew each time: see ``items``."""
        return Layout(trees.map_leaves(lambda leaf: Hole() if _is_item(leaf) else leaf, self.tree), ())

    @property
    def is_plain(self) -> bool:
        """Whether everything but the items is of types that nobody changes or defines anew."""
        return trees.is_plain_tree(self.tree, lambda leaf: type(leaf) in trees.PLAIN or _is_item(leaf))

    @property
    def has_keys(self) -> bool:
        """Whether random keys go into some of the holes."""
        return any(isinstance(leaf, KeyHole) for leaf in trees.leaves(self.tree))

    @property
    def has_references(self) -> bool:
        return any(isinstance(leaf, RRef | ReferenceHole | ByReference) for leaf in trees.leaves(self.tree))

    def items(self) -> "list[Operand | Any]":
        """What goes into the holes of ``emptied``: arrays, and what is made of operands."""
        found, count = list[Any](), 0
        for leaf in trees.leaves(self.tree):
            if isinstance(leaf, Hole | ReferenceHole):
                width = getattr(leaf, "width", 1)
                found.append(Operand(leaf, tuple(range(count, count + width))))
                count += width
            elif _is_item(leaf):
                found.append(leaf)
        return found

    def holes(self) -> list[Any]:
        """For each operand, its hole."""
        found = [leaf for leaf in trees.leaves(self.tree) if isinstance(leaf, Hole | ReferenceHole)]
        return [hole for hole in found for _ in range(getattr(hole, "width", 1))]

    def by_reference(self) -> Any:
        """The tree, holes and all, with every reference to be passed as one more than it was."""

        def wrap(leaf: Any) -> Any:
            if isinstance(leaf, ReferenceHole):
                return dataclasses.replace(leaf, wraps=leaf.wraps + 1)
            return ByReference(leaf) if isinstance(leaf, RRef | ByReference) else leaf

        return trees.map_leaves(wrap, self.tree)


def _is_item(leaf: Any) -> bool:
    return isinstance(leaf, Hole | ReferenceHole | ByReference | np.ndarray) or is_array(leaf)


def split(tree: Any, pick: Callable[[Any], bool] = is_traced) -> tuple[Layout, list[Any]]:
    """Take the picked leaves out of a tree."""
    operands: list[Any] = []
    positions: list[int] = []
    numbers = iter(range(1 << 30))

    def dig(leaf: Any) -> Any:
        number = next(numbers)
        if not pick(leaf):
            return leaf
        hole, found = _dig(leaf)
        operands.extend(found)
        positions.extend([number] * len(found))
        return hole

    holed = trees.map_leaves(dig, tree)
    return Layout(holed, tuple(positions)), operands


def _dig(leaf: Any) -> tuple[Any, list[Any]]:
    reference, wraps = leaf, 0
    while isinstance(reference, ByReference):
        reference, wraps = reference.rref, wraps + 1
    if isinstance(reference, RRef):
        children, structure = jax.tree.flatten(reference)
        return ReferenceHole(structure, wraps, None if staging() else reference._claim), children
    if is_key(leaf):
        return KeyHole(str(jax.random.key_impl(leaf))), [jax.random.key_data(leaf)]
    return Hole(), [leaf]


def arrays_of(tree: Any) -> list[Any]:
    """The arrays of a tree; of random keys, their data."""
    return [tree] if isinstance(tree, jax.Array) and not is_key(tree) else split(tree, is_array)[1]


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys of the new style."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is one JAX can compute with; a reference is, by its handle."""
    if isinstance(leaf, jax.Array | RRef):
        return True
    return isinstance(leaf, np.ndarray | np.generic) and (leaf.dtype.kind in "biufc" or _is_extended(leaf.dtype))


def _is_extended(dtype: np.dtype) -> bool:
    return dtype.kind == "V" and dtype.names is None and jnp.issubdtype(dtype, np.number)


def is_differentiable(leaf: Any) -> bool:
    """Whether an array has a derivative."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def has_gradient(leaf: Any) -> bool:
    """Whether a leaf of a value can have a gradient: a float array, or a reference by its handle."""
    return isinstance(leaf, RRef) or (is_array(leaf) and is_differentiable(leaf))


def only_floats(value: Any) -> Any:
    """A value with nothing in the place of what has no gradient: the structure of its gradient."""
    return trees.map_leaves(lambda leaf: leaf if has_gradient(leaf) else None, value)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))
