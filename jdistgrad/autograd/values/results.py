"""The results of a remote function: the arrays among them, and the tree around these arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.values.holes import Hole, Layout, is_array, shape_of, split
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc import trees
from jdistgrad.wire.arrays import as_jax_array


class Results:
    """The layout and shapes of one call's results, known once the call has run or its shapes have been requested."""

    def __init__(self, outer: "Results | None" = None):
        self._outer = outer  # the same results without a batch dimension
        self.known: tuple[Layout, list[jax.ShapeDtypeStruct]] | None = None  # the layout, and the shapes of its arrays
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self.are_arrays = False  # whether results are known to hold only arrays and constants of built-in types

    def learn(self, known: tuple[Layout, list[jax.ShapeDtypeStruct]]) -> None:
        self.known, (layout, self.shapes) = known, known
        self.are_arrays = layout.is_plain and not layout.has_references
        if self._outer is not None:
            self._outer.learn((layout, [one.update(shape=one.shape[1:]) for one in self.shapes]))

    def flatten(self, value: Any) -> list[Any]:
        """Return the arrays of a result; the first result also sets the layout."""
        layout, arrays = split(value, is_array)
        if self.known is None:
            self.learn((layout, [shape_of(one) for one in arrays]))
        return self.arrived(arrays)

    @property
    def have_keys(self) -> bool:
        """Return whether the results are known to hold random keys: compiled code needs their key data instead."""
        leaves = () if self.known is None else trees.leaves(self.known[0].tree)
        return any(isinstance(leaf, Hole) and leaf.impl is not None for leaf in leaves)

    def arrived(self, arrays: list[Any]) -> list[Any]:
        return as_jax(self.counted(arrays))

    def counted(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays. Raises DifferentiationError if their number, a shape or a dtype is not the known one."""
        if len(arrays) != len(self.shapes):
            raise changed_structure(len(arrays), len(self.shapes))
        for array, shape in zip(arrays, self.shapes, strict=True):
            # JAX makes float32 of NumPy's float64 without x64.
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

        JAX keeps the call, and so its layout, for ever.
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

    Compiled code that takes it in this form need never make the array.
    """

    value: np.ndarray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def made(arrays: Sequence[Any]) -> list[Any]:
    return [jax.numpy.full(one.shape, one.value) if isinstance(one, Uniform) else one for one in arrays]
