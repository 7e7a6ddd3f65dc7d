"""The results of a remote function: the arrays among them, and the tree around these arrays."""

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.values.holes import Layout, is_array, shape_of, split
from jdistgrad.errors import DifferentiationError
from jdistgrad.wire.arrays import as_jax_array


class Results:
    """The layout and shapes of one call's results, known once the call has run or its shapes have been requested."""

    def __init__(self, outer: "Results | None" = None):
        self._outer = outer  # the same results without a batch dimension
        self._known: tuple[Layout, list[jax.ShapeDtypeStruct]] | None = None
        self.are_arrays = False  # whether results are known to hold only arrays and constants of built-in types
        self._lock = threading.Lock()

    @property
    def known(self) -> tuple[Layout, list[jax.ShapeDtypeStruct]] | None:
        """Return the layout and the shapes of its arrays, or None if they are not known yet."""
        return self._known

    @property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        assert self._known is not None
        return self._known[1]

    def learn(self, known: tuple[Layout, list[jax.ShapeDtypeStruct]]) -> None:
        self._known = known
        self.are_arrays = known[0].is_plain and not known[0].has_references
        if self._outer is not None:
            layout, shapes = known
            self._outer.learn((layout, [one.update(shape=one.shape[1:]) for one in shapes]))

    def flatten(self, value: Any) -> list[Any]:
        """Return the arrays of a result; the first result also sets the layout."""
        layout, arrays = split(value, is_array)
        if self._known is None:
            self.learn((layout, [shape_of(one) for one in arrays]))
        return self.arrived(arrays)

    @property
    def have_keys(self) -> bool:
        """Return whether the results are known to hold random keys: compiled code needs their key data instead."""
        return self._known is not None and self._known[0].has_keys

    def arrived(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays of an answer that holds arrays only, as JAX arrays."""
        return as_jax(self.counted(arrays))

    def counted(self, arrays: list[Any]) -> list[Any]:
        """Return the arrays. Raises DifferentiationError if their number, a shape or a dtype is not the known one."""
        if len(arrays) != len(self.shapes):
            raise changed_structure(len(arrays), len(self.shapes))
        for array, shape in zip(arrays, self.shapes, strict=True):
            if array.shape != shape.shape or not _becomes(array.dtype, shape.dtype):
                raise changed_array(array, shape)
        return arrays

    def rebuild(self, arrays: Any) -> Any:
        """Return the result that contains these arrays. Its references alone keep their values alive from now on.

        JAX keeps the call, and so its layout, for ever.
        """
        assert self._known is not None
        layout, shapes = self._known
        result = layout.fill(arrays)
        if not self.are_arrays:
            self._known = layout.released()[0], shapes
        return result

    def batched(self) -> "Results":
        """Return the same results with a batch dimension. Learning their layout also sets the layout of these."""
        return Results(self)


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


def changed_array(found: Any, expected: jax.ShapeDtypeStruct) -> DifferentiationError:
    was, had = (f"{one.dtype}{list(one.shape)}" for one in (found, expected))
    return DifferentiationError(
        f"a remote function returned {was}; when it was traced, or called before, it returned {had}. A function called "
        "inside jax.jit, or differentiated, must return arrays of the same shapes and dtypes each time."
    )


def _becomes(found: np.dtype, expected: np.dtype) -> bool:
    """Return whether JAX makes an array of the expected dtype: of NumPy's float64 without x64 it makes float32."""
    return found == expected or jax.dtypes.canonicalize_dtype(found) == expected


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uniform:
    """An array as its number and shape: compiled code that takes it in this form need never make the array."""

    value: np.ndarray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> int:
        return self.value.nbytes * math.prod(self.shape)

    def make(self, numpy: Any) -> Any:
        return numpy.full(self.shape, self.value)


def made(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays, with each Uniform made into an array."""
    return [one.make(jax.numpy) if isinstance(one, Uniform) else one for one in arrays]
