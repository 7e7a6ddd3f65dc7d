"""The results of a remote function: which of them are arrays, and what surrounds them."""

import threading
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.values.holes import Layout, is_array, shape_of, split
from jdistgrad.errors import DifferentiationError
from jdistgrad.wire.arrays import adopted


class Results:
    """What is known of one call's results: everything after it has run once, or its shapes have been asked for."""

    def __init__(self, outer: "Results | None" = None):
        self._outer = outer  # the same without a batch dimension
        self._known: tuple[Layout, list[jax.ShapeDtypeStruct]] | None = None
        self.are_arrays = False  # whether it is made of arrays, as far as is known, and of what never changes
        self._lock = threading.Lock()

    @property
    def known(self) -> tuple[Layout, list[jax.ShapeDtypeStruct]] | None:
        """The layout, and the shapes of the arrays in it."""
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
        """A result's arrays."""
        layout, arrays = split(value, is_array)
        if self._known is None:
            self.learn((layout, [shape_of(one) for one in arrays]))
        return self.arrived(arrays)

    @property
    def have_keys(self) -> bool:
        """Whether random keys are known to be among them: compiled code must be sent their data."""
        return self._known is not None and self._known[0].has_keys

    def arrived(self, arrays: list[Any]) -> list[Any]:
        """The arrays, where nothing else was sent."""
        return as_jax(self.counted(arrays))

    def counted(self, arrays: list[Any]) -> list[Any]:
        """A result's arrays, if they are as many as before."""
        if len(arrays) != len(self.shapes):
            raise changed_structure(len(arrays), len(self.shapes))
        return arrays

    def rebuild(self, arrays: Any) -> Any:
        """The result that has these arrays."""
        assert self._known is not None
        return self._known[0].fill(arrays)

    def batched(self) -> "Results":
        """The same with a batch dimension."""
        return Results(self)


def as_jax(arrays: list[Any]) -> list[Any]:
    return [adopted(one) if isinstance(one, np.ndarray | np.generic) else one for one in arrays]


def strong(array: Any) -> Any:
    """An array whose type is its own: a weak one, which is what a Python number became, would give way to others."""
    weak = isinstance(array, jax.Array) and array.ndim and array.weak_type
    return jax.lax.convert_element_type(array, array.dtype) if weak else array


def changed_structure(found: int, expected: int) -> DifferentiationError:
    return DifferentiationError(
        f"a remote function returned {found} arrays; when it was traced, it returned {expected}. A function called "
        "inside jax.jit must return the same structure each time."
    )
