"""What crosses the boundary, whatever it is.

An operation has operands and outputs, all of them arrays. It can be started on concrete operands, and knows the shapes
of its outputs and how it is batched.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

Shapes = list[jax.ShapeDtypeStruct]
TOKEN = jax.ShapeDtypeStruct((2,), np.uint32)
TAG = jax.ShapeDtypeStruct((4,), np.uint32)


@dataclasses.dataclass
class Started:
    """An operation under way. ``known``: the first outputs, known before the answer; ``finish`` makes it the others."""

    future: concurrent.futures.Future
    finish: Callable[[Any], list[Any]]
    known: Sequence[Any] = ()

    def outputs(self) -> list[Any]:
        return [*self.known, *self.rest()]

    def rest(self) -> list[Any]:
        """The outputs that come with the answer."""
        return self.finish(self.future.result())


@dataclasses.dataclass
class Batched:
    """An operation over a batch. ``spread``: operands that must be given a batch dimension, where they have none.

    ``outputs`` says of so many outputs which have one.
    """

    operation: "Operation"
    outputs: Callable[[int], list[bool]]
    spread: Sequence[int] = ()


class Operation(Protocol):
    def start(self, operands: Sequence[Any]) -> Started: ...

    def shapes(self, operands: Shapes) -> Shapes: ...

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands that ``start`` looks at: staged and compiled code hand it no others."""

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """The operation over operands some of which begin with a batch dimension."""


def done(outputs: list[Any]) -> Started:
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result(outputs)
    return Started(future, list)


def nothing_more(answer: Any) -> list[Any]:
    """The outputs that an answer brings where all were known before."""
    return []
