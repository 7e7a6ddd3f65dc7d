"""Trees with holes: arguments or results of a call, split into arrays that JAX may trace and everything else.

Also the results of a remote function: the arrays among them, and the tree around these arrays.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.errors import DifferentiationError
from jdistgrad.leaves import LeafSpec, as_jax_array, is_key, plain
from jdistgrad.rpc import trees
from jdistgrad.rpc.handles import marks_of, with_marks
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.traced_hook import is_traced, staging


@dataclasses.dataclass(frozen=True, eq=False)
class Hole:
    """A place for an array. ``impl``: that of random keys, if the operand is their key data."""

    impl: str | None = None
    width: ClassVar[int] = 1  # the number of operands

    def refill(self, operands: Iterator[Any]) -> Any:
        return next(operands) if self.impl is None else jax.random.wrap_key_data(next(operands), impl=self.impl)


@dataclasses.dataclass(frozen=True, eq=False)
class ReferenceHole:
    """A place for a reference, for which operands stand. ``wraps`` counts the ByReference wrappers around it.

    ``kept`` is the claim that keeps the value alive for backward passes. It is None in staged code, which JAX keeps for
    ever: there the hole has only the reference's key. ``known``: what stands for a reference that needs no operands.
    """

    structure: Any
    wraps: int
    kept: Any
    known: Sequence[Any] = ()

    @property
    def width(self) -> int:
        return 0 if self.known else self.structure.num_leaves

    def refill(self, operands: Iterator[Any]) -> Any:
        filled = reference_of(self.structure, self.known or [next(operands) for _ in range(self.width)])
        for _ in range(self.wraps):
            filled = ByReference(filled)
        return filled


@dataclasses.dataclass(frozen=True)
class Operand:
    """The content of a hole: an operand, or a reference made of several operands. ``numbers`` gives their numbers."""

    hole: "Hole | ReferenceHole"
    numbers: tuple[int, ...]

    def of(self, operands: Sequence[Any]) -> Any:
        if isinstance(self.hole, Hole):
            return operands[self.numbers[0]]
        return self.hole.refill(operands[k] for k in self.numbers)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A tree with holes in place of picked leaves. ``positions`` gives the number of each operand's leaf."""

    tree: Any
    positions: tuple[int, ...]

    def fill(self, operands: Iterable[Any]) -> Any:
        rest = iter(operands)

        def refill(leaf: Any) -> Any:
            return leaf.refill(rest) if isinstance(leaf, Hole | ReferenceHole) else leaf

        filled = trees.map_leaves(refill, self.tree)
        if next(rest, _NONE_LEFT) is not _NONE_LEFT:
            kinds = {type(node) for node in trees.nodes(self.tree)} - {dict, list, tuple}
            names = ", ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds))
            raise DifferentiationError(
                f"{names} cannot be rebuilt: with other objects in place of its arrays, the pytree has fewer leaves. "
                "Let its pytree registration not depend on the types of its children, or send the arrays and make the "
                "object of them in the called function."
            )
        return filled

    def only_holes(self) -> "Layout":
        tree = trees.map_leaves(lambda leaf: leaf if isinstance(leaf, Hole | ReferenceHole) else None, self.tree)
        return Layout(tree, self.positions)

    def emptied(self) -> "Layout":
        """Return the tree with holes for everything that each message carries: see ``items``."""
        return Layout(trees.map_leaves(lambda leaf: Hole() if _is_item(leaf) else leaf, self.tree), ())

    @property
    def is_plain(self) -> bool:
        """Return whether everything but the items has a built-in type, which users cannot change or define anew."""

        def is_plain(leaf: Any) -> bool:
            kind = type(leaf)
            number = isinstance(leaf, np.generic) and kind.__module__ in ("numpy", "ml_dtypes")
            return kind in trees.PLAIN or number or _is_item(leaf)

        return trees.is_plain_tree(self.tree, is_plain)

    @property
    def has_references(self) -> bool:
        return any(isinstance(leaf, RRef | ReferenceHole | ByReference) for leaf in trees.leaves(self.tree))

    def items(self) -> "list[Operand | Any]":
        """Return what fills the holes of ``emptied``: arrays, references, and an Operand for each hole of the tree."""
        found, count = list[Any](), 0
        for leaf in trees.leaves(self.tree):
            if isinstance(leaf, Hole | ReferenceHole):
                found.append(Operand(leaf, tuple(range(count, count + leaf.width))))
                count += leaf.width
            elif _is_item(leaf):
                found.append(leaf)
        return found

    def holes(self) -> list[Any]:
        found = [leaf for leaf in trees.leaves(self.tree) if isinstance(leaf, Hole | ReferenceHole)]
        return [hole for hole in found for _ in range(hole.width)]

    def released(self) -> "tuple[Layout, list[Any]]":
        """Return a layout that keeps no value alive, and the claims by which this one does."""
        claims = list[Any]()

        def release(leaf: Any) -> Any:
            if isinstance(leaf, ReferenceHole):
                claims.append(leaf.kept)
                return dataclasses.replace(leaf, kept=None)
            reference, wraps = _unwrapped(leaf)
            if not isinstance(reference, RRef):
                return leaf
            claims.append(reference.claim)
            children, structure = operands_of(reference)
            return ReferenceHole(structure, wraps, None, children)

        return Layout(trees.map_leaves(release, self.tree), self.positions), claims

    def by_reference(self) -> Any:
        """Return the tree, holes included, with one more ByReference wrapper around every reference."""

        def wrap(leaf: Any) -> Any:
            if isinstance(leaf, ReferenceHole):
                return dataclasses.replace(leaf, wraps=leaf.wraps + 1)
            return ByReference(leaf) if isinstance(leaf, RRef | ByReference) else leaf

        return trees.map_leaves(wrap, self.tree)


_NONE_LEFT = object()


def _is_item(leaf: Any) -> bool:
    if isinstance(leaf, np.generic):  # a number, which the called function may need as such, for a static argument
        return False
    return isinstance(leaf, Hole | ReferenceHole | ByReference | np.ndarray) or is_array(leaf)


def split(tree: Any, pick: Callable[[Any], bool] = is_traced) -> tuple[Layout, list[Any]]:
    """Split a tree into a layout with holes in place of the picked leaves, and the operands of these leaves."""
    operands: list[Any] = []
    positions: list[int] = []
    numbers = iter(range(1 << 30))

    def dig(leaf: Any) -> Any:
        number = next(numbers)
        if not pick(leaf):
            return leaf
        hole: Hole | ReferenceHole
        reference, wraps = _unwrapped(leaf)
        if isinstance(reference, RRef):
            found, structure = operands_of(reference)
            hole = ReferenceHole(structure, wraps, None if staging() else reference.claim)
        elif is_key(leaf):
            hole, found = Hole(LeafSpec.of(leaf).impl), [plain(leaf)]
        else:
            hole, found = Hole(), [leaf]
        operands.extend(found)
        positions.extend([number] * len(found))
        return hole

    holed = trees.map_leaves(dig, tree)
    return Layout(holed, tuple(positions)), operands


def operands_of(reference: RRef[Any]) -> tuple[list[Any], Any]:
    """Return a reference's operands (its marks, and its token if there is one) and its structure."""
    (handle, *token), structure = jax.tree.flatten(reference)
    return [marks_of(handle), *token], structure


def reference_of(structure: Any, operands: Sequence[Any]) -> Any:
    marks, *token = operands
    return jax.tree.unflatten(structure, [with_marks(marks), *token])


def _unwrapped(leaf: Any) -> tuple[Any, int]:
    """Return a leaf without the ByReference wrappers around it, and their number."""
    wraps = 0
    while isinstance(leaf, ByReference):
        leaf, wraps = leaf.rref, wraps + 1
    return leaf, wraps


def arrays_of(tree: Any) -> list[Any]:
    return [tree] if isinstance(tree, jax.Array) and not is_key(tree) else split(tree, is_array)[1]


def is_array(leaf: Any) -> bool:
    """Return whether JAX can compute with a leaf. A reference counts, by its handle."""
    if isinstance(leaf, jax.Array | RRef):
        return True
    if not isinstance(leaf, np.ndarray | np.generic):
        return False
    extended = leaf.dtype.kind == "V" and leaf.dtype.names is None  # bfloat16, float8_e4m3 and the like
    return leaf.dtype.kind in "biufc" or (extended and jnp.issubdtype(leaf.dtype, np.number))


def can_be_traced(leaf: Any) -> bool:
    """Return whether a leaf may be an argument of compiled code: an array, or a number."""
    return is_array(leaf) or isinstance(leaf, int | float | complex) or hasattr(leaf, "__jax_array__")


def is_differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def has_gradient(leaf: Any) -> bool:
    """Return whether a leaf of a value can have a gradient: a float array, or a reference by its handle."""
    return isinstance(leaf, RRef) or (is_array(leaf) and is_differentiable(leaf))


def is_float_array(leaf: Any) -> bool:
    """Return whether a leaf of a value is a float array. A reference is not, though it has a gradient: its value's."""
    return has_gradient(leaf) and not isinstance(leaf, RRef)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False)))


class Results:
    """The layout and shapes of one call's results, known once the call has run or its shapes have been requested."""

    def __init__(self, outer: "Results | None" = None):
        self._outer = outer  # the same results without a batch dimension
        self.known: tuple[Layout, list[jax.ShapeDtypeStruct]] | None = None  # the layout, and the shapes of its arrays
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self.are_arrays = False  # whether results are known to hold only arrays and constants of built-in types

    def learn(self, known: tuple[Layout, list[jax.ShapeDtypeStruct]]) -> None:
        layout, self.shapes = known
        self.known = known  # after the shapes, which other threads read once it is
        self.are_arrays = layout.is_plain and not layout.has_references
        if self._outer is not None:
            self._outer.learn((layout, [one.update(shape=one.shape[1:]) for one in self.shapes]))

    def flatten(self, value: Any) -> list[Any]:
        """Return the arrays of a result; the first result also sets the layout."""
        layout, arrays = split(value, is_array)
        if self.known is None:
            self.learn((layout, [shape_of(one) for one in arrays]))
        return as_jax(self.counted(arrays))

    @property
    def have_keys(self) -> bool:
        """Return whether the results are known to hold random keys: compiled code needs their key data instead."""
        leaves = () if self.known is None else trees.leaves(self.known[0].tree)
        return any(isinstance(leaf, Hole) and leaf.impl is not None for leaf in leaves)

    def counted(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays. Raises DifferentiationError if their number, a shape or a dtype is not the known one."""
        if len(arrays) != len(self.shapes):
            raise changed_structure(len(arrays), len(self.shapes))
        for array, shape in zip(arrays, self.shapes, strict=True):
            # JAX converts NumPy's float64 to float32 without jax_enable_x64.
            same = array.dtype == shape.dtype or jax.dtypes.canonicalize_dtype(array.dtype) == shape.dtype
            if array.shape != shape.shape or not same:
                was, had = (f"{one.dtype}{list(one.shape)}" for one in (array, shape))
                raise DifferentiationError(
                    f"a remote function returned {was}; when it was traced, or called before, it returned {had}. A "
                    "function called inside jax.jit, or differentiated, must return arrays of the same shapes and "
                    "dtypes each time."
                )
        return arrays

    def rebuild(self, arrays: Any) -> Any:
        """Return the result that contains these arrays. Its references alone keep their values alive from now on.

        JAX 0.10 keeps the call, and so its layout, for ever.
        """
        assert self.known is not None
        layout, shapes = self.known
        result = layout.fill(arrays)
        if not self.are_arrays:
            self.known = layout.released()[0], shapes
        return result


def as_jax(arrays: list[Any]) -> list[Any]:
    return [as_jax_array(one) if isinstance(one, np.ndarray | np.generic) else one for one in arrays]


def strong(array: Any) -> Any:
    """Return the array without its weak type, if it has dimensions: a weak type gives way to the types of others."""
    weak = isinstance(array, jax.Array) and array.ndim and array.weak_type
    return jax.lax.convert_element_type(array, array.dtype) if weak else array


def changed_structure(found: int, expected: int) -> DifferentiationError:
    return DifferentiationError(
        f"a remote function returned {found} arrays; when it was traced, it returned {expected}. A function called "
        "inside jax.jit must return the same structure each time."
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uniform:
    """An array that is one number everywhere, such as the cotangent of a sum's operand: only the number is sent.

    Compiled code that takes this form need never make the array.
    """

    value: np.ndarray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def made(arrays: Sequence[Any]) -> list[Any]:
    return [jax.numpy.full(one.shape, one.value) if isinstance(one, Uniform) else one for one in arrays]
