"""Operations: the protocol of the actions that JAX sees cross the wire.

An operation has operands and outputs, all of them arrays. It can be started on concrete operands, and it knows the
shapes of its outputs and its form over a batch.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

Shapes = list[jax.ShapeDtypeStruct]
TOKEN_SHAPE = jax.ShapeDtypeStruct((2,), np.uint32)
TAG_SHAPE = jax.ShapeDtypeStruct((4,), np.uint32)


@dataclasses.dataclass
class Started:
    """An operation under way. ``known``: the outputs known before the answer; ``finish`` turns it into the others."""

    future: concurrent.futures.Future[Any]
    finish: Callable[[Any], list[Any]]
    known: Sequence[Any] = ()

    def outputs(self) -> list[Any]:
        return [*self.known, *self.rest()]

    def rest(self) -> list[Any]:
        """Wait for the answer and return the outputs that come with it."""
        return self.finish(self.future.result())


@dataclasses.dataclass
class Batched:
    """An operation over a batch. ``spread``: operands that must get a batch dimension if they have none.

    ``outputs`` takes the number of outputs and tells for each whether it has a batch dimension.
    """

    operation: "Operation"
    outputs: Callable[[int], list[bool]]
    spread: Sequence[int] = ()


class Operation(Protocol):
    def start(self, operands: Sequence[Any]) -> Started: ...

    def shapes(self, operands: Shapes) -> Shapes: ...

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands that ``start`` reads: staged and compiled code pass only these."""

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Return the operation over a batch. ``batched`` tells which operands begin with a batch dimension."""


def done(outputs: list[Any]) -> Started:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_result(outputs)
    return Started(future, list)


def nothing_more(answer: Any) -> list[Any]:
    """Return no outputs: the answer of an operation whose outputs were all known before adds none."""
    return []
