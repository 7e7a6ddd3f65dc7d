"""Operations on values and gradients: fetch or publish a value, put a contribution to a gradient, take the sum.

The derivative of ``fetch`` and of ``take`` is a ``put``, that of ``publish`` and of ``put`` a ``take``. Contributions
go through the owner's ledger. Each operation returns or needs a handle. The cotangents of handles are the marks of
contributions. JAX adds them up: the sum tells the owner how many contributions to wait for, and which.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.callee.contributions import (
    AddStop,
    ReadStop,
    TakeStop,
    value_layout,
)
from jdistgrad.autograd.operations.messages import Crossing
from jdistgrad.autograd.tape.ledger import mark
from jdistgrad.autograd.tape.tape import next_number, next_place, note_contribution, note_fetched
from jdistgrad.autograd.values.holes import Hole, Layout, Operand, Results, as_jax, reference_of
from jdistgrad.autograd.values.primitive import TOKEN_SHAPE, Batched, Operation, Shapes, Started, done
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc.claims import Claim
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import by_reference
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import as_token, from_token


@dataclasses.dataclass(eq=False)
class Fetch(Crossing):
    """A fetch of a reference's value. Operands: what stands for the reference. Outputs: the arrays of the value."""

    to: int
    reference: Any  # the reference's tree structure
    results: Results
    timeout: float | None
    recorded: bool = False
    title = "a fetch of a reference's value"
    function, where, reads = None, "", True

    def start(self, operands: Sequence[Any]) -> Started:
        rref = reference_of(self.reference, operands)
        if self.recorded:
            note_fetched(rref.claim.id, rref.claim.owner)

        def finish(value: Any) -> list[Any]:
            if isinstance(rref.claim, Claim):
                rref.claim.arrived = True
            return self.results.flatten(value)

        if self.results.have_keys and isinstance(rref.claim, Claim):
            stop, items = self.stop()
            return self.alone(stop, None, (rref.id,), items, lambda arrays: as_jax(self.results.counted(arrays)))
        return Started(rref.value_future(self.timeout), finish)

    def at_once(self, operands: Sequence[Any]) -> Any:
        """Return the claim, if the value is known to exist elsewhere and to hold only arrays; else None."""
        claim = reference_of(self.reference, operands).claim
        at_hand = isinstance(claim, Claim) and claim.is_made and claim.owner != claim.mailbox.rank
        return claim if at_hand and self.timeout is None and self.results.are_arrays else None

    def stop(self) -> tuple[ReadStop, list[Any]]:
        return ReadStop(len(self.results.shapes)), []

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        claim = reference_of(self.reference, operands).claim
        if self.recorded:
            note_fetched(claim.id, claim.owner)
        return (claim.id,)

    def finish(self, arrays: list[Any]) -> list[Any]:
        return self.results.counted(arrays)

    def shapes(self, operands: Shapes) -> Shapes:
        if self.results.known is None:
            rref = reference_of(self.reference, [NO_MARKS, *operands[1:]])
            args = (by_reference(rref),)
            self.results.learn(current_worker().rpc_sync(rref.owner, value_layout, args, {}, self.timeout))
        return self.results.shapes


@dataclasses.dataclass(eq=False)
class Publish(Operation):
    """The publication of a value that stays here, under an id. Operands: the value's arrays. Output: its handle."""

    value: Layout
    id: int
    title = "jdistgrad.RRef"

    def start(self, operands: Sequence[Any]) -> Started:
        owned = current_worker().references.owned.announce(self.id)
        owned.value.set_result(self.value.fill(operands))
        return done([NO_MARKS])

    def shapes(self, operands: Shapes) -> Shapes:
        raise DifferentiationError(
            "jdistgrad.RRef was called inside jax.jit (or scan, checkpoint ...), where the value has no data. Call it "
            "outside."
        )


@dataclasses.dataclass(eq=False)
class Put(Crossing):
    """A contribution to the gradient of a target: a reference, a contribution, or a sum that was taken.

    Operands: the target's token, and the leaves that are not zero (``live`` of ``count``). Outputs: the handle, and the
    token of this contribution.
    """

    to: int
    kind: str
    live: tuple[int, ...]
    count: int
    lanes: tuple[int, ...] = ()
    title = "a contribution to the gradient of a {0.kind} on rank {0.to}"
    contributes = True
    function, where, first = None, "", 2

    def start(self, operands: Sequence[Any]) -> Started:
        if self.to != current_worker().rank:
            return super().start(operands)
        numbers = self.drawn(operands)
        self.stop()[0].of_run(None, numbers)(list(operands[1:]))
        return done(self.known(numbers))

    def at_once(self, operands: Sequence[Any]) -> Any:
        return None if self.to == current_worker().rank else operands

    def stop(self) -> tuple[AddStop, list[Any]]:
        stop = AddStop(self.kind, self.lanes, tuple(k in self.live for k in range(self.count)))
        return stop, [Operand(Hole(), (1 + k,)) for k in range(len(self.live))]

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        (identifier,), number, place = from_token(operands[0]), next_number(), next_place()
        note_contribution(self.to, identifier, number)
        return identifier, number, *place

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        number = numbers[1]
        return [np.full((*self.lanes, *NO_MARKS.shape), mark(number), NO_MARKS.dtype), as_token(number)]

    def shapes(self, operands: Shapes) -> Shapes:
        return [jax.ShapeDtypeStruct((*self.lanes, *NO_MARKS.shape), NO_MARKS.dtype), TOKEN_SHAPE]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return dataclasses.replace(self, lanes=(size, *self.lanes)), (1,), range(1, len(batched))


@dataclasses.dataclass(eq=False)
class Take(Crossing):
    """The sum of the contributions to a target.

    Operands: the handle, whose marks identify the contributions, and the target's token. Outputs: the token of the sum,
    and its wanted leaves.
    """

    to: int
    kind: str
    wanted: tuple[int, ...]
    count: int  # the number of leaves in all
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # shapes of the wanted leaves
    lanes: tuple[int, ...] = ()
    title = "the sum of contributions on rank {0.to}"
    function, where, first = None, "", 1

    def stop(self) -> tuple[TakeStop, list[Any]]:
        return TakeStop(self.kind, self.lanes), [Operand(Hole(), (0,))]

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        marks, *others = np.reshape(operands[0], (-1, *NO_MARKS.shape))
        if any(np.any(one != marks) for one in others):  # they count for all lanes: the owner would wait for ever
            raise DifferentiationError(
                f"{self} has no derivative row by row, as jax.jacrev takes it of a function that returns the gradient "
                "of a reference. Differentiate a copy of the value, rref.to_here()."
            )
        return *from_token(operands[1]), next_number()

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        return [as_token(numbers[1])]

    def finish(self, arrays: list[Any]) -> list[Any]:
        found = arrays or [None] * self.count  # empty if there are no contributions
        zeros = (np.zeros(self.lanes + one.shape, one.dtype) for one in self.leaves)
        wanted = [found[k] for k in self.wanted]
        return as_jax([zero if one is None else one for one, zero in zip(wanted, zeros, strict=True)])

    def shapes(self, operands: Shapes) -> Shapes:
        return [TOKEN_SHAPE, *(jax.ShapeDtypeStruct(self.lanes + one.shape, one.dtype) for one in self.leaves)]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return dataclasses.replace(self, lanes=(size, *self.lanes)), (0,), ()
