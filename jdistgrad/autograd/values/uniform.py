"""Arrays that are one number everywhere, such as the cotangent of a sum's operand: only the number is sent."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


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
