"""Arrays that are one number everywhere, such as the cotangent of what is summed: sent as that number."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Uniform:
    """An array before it is made: compiled code that gets it so need not make it at all."""

    value: np.ndarray
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> int:
        return self.value.nbytes * math.prod(self.shape)

    def make(self, numpy: Any) -> Any:
        return numpy.full(self.shape, self.value)


def made(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, those of one number too."""
    return [one.make(jax.numpy) if isinstance(one, Uniform) else one for one in arrays]
