"""Differentiable calls whose result stays on the callee: the owner pulls once the whole gradient has come."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.callee.functions import Publishing, pulled_back
from jdistgrad.autograd.callee.orders import Orders, pulled
from jdistgrad.autograd.operations import rules
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.operations.owned_values import Take
from jdistgrad.autograd.tape.ledger import REFERENCE
from jdistgrad.autograd.tape.tape import current_tape, replaying
from jdistgrad.autograd.values.primitive import TOKEN_SHAPE, Operation, Shapes, Started
from jdistgrad.autograd.values.typed import MadeOf
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.owned import WHOLE
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import as_token, from_token

REMOTE_TAG = jax.ShapeDtypeStruct((6,), np.uint32)
MARKS_SHAPE = jax.ShapeDtypeStruct(NO_MARKS.shape, NO_MARKS.dtype)


@dataclasses.dataclass(eq=False)
class CallRemote(Call):
    """A call that makes a reference. Outputs: its handle and its token; before them the tag, if the call is recorded.

    ``staged``: the call runs in compiled code. No RRef holds the reference there, so the context does. ``results``
    describe the value, which is the function's result.
    """

    results_come_here = False
    has_references = True
    batched = Operation.batched
    staged: bool = False
    made: list[Any] = dataclasses.field(default_factory=list)  # its claim; recorded copies share the list

    def start(self, operands: Sequence[Any]) -> Started:
        tape = None
        if self.staged or self.orders:  # raises outside any context, before the claim is made
            tape = current_tape(lambda: f"{describe(self.function)}, called remotely{self.staged * ' in jax.jit'},")
        claim = current_worker().references.claim_new(self.to)
        if tape is not None and self.staged:
            tape.kept.append(claim)
        else:
            self.made.append(claim)
        numbers = self.noted(operands, lambda: f"{describe(self.function)} on worker {self.to}")
        known = [NO_MARKS, as_token(claim.id)]
        if numbers:
            known = [as_token(*from_token(*self.known(numbers)), claim.id), *known]
        future = self.send(Publishing(self.function, claim.id), numbers, operands)
        claim.add(WHOLE)
        return Started(future, lambda _: [], known)

    def shapes(self, operands: Shapes) -> Shapes:
        super().shapes(operands)
        return [*([REMOTE_TAG] if self.orders else []), MARKS_SHAPE, TOKEN_SHAPE]

    def tangent_shapes(self) -> Shapes:
        return [MARKS_SHAPE]

    def pullback(self, live: tuple[int, ...]) -> Any:
        return PullbackAtOwner(self.function, self.leaves())


@dataclasses.dataclass(frozen=True)
class PullbackAtOwner(MadeOf):
    """The pullback of a function whose result stayed here. The result's cotangent is taken from the owner's ledger."""

    orders: Orders
    title = "the pullback of {}"

    def __call__(self, tag: Any, number: Any, args: Any, kwargs: Any, handle: Any) -> list[Any]:
        results, pullback = pulled_back(tag, self.function, self.orders, None, args, kwargs)
        shapes = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in results)
        numbers = tuple(range(len(shapes)))
        gradient = Take(current_worker().rank, REFERENCE, numbers, len(shapes), shapes)
        with replaying(number):
            *cotangents, _ = rules.take(gradient)(handle, tag[4:])
            return pulled(pullback, cotangents)
