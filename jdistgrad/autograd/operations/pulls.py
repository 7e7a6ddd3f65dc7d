"""The pull of a recorded call's pullback."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.autograd.callee.bundle import PullStop
from jdistgrad.autograd.callee.pullbacks import Map
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.tape.links import Link
from jdistgrad.autograd.tape.program_order import next_place
from jdistgrad.autograd.tape.tape import Tape, next_number
from jdistgrad.autograd.values.holes import Hole, Layout, Operand
from jdistgrad.autograd.values.operation import TOKEN_SHAPE, Batched, Shapes, Started, done
from jdistgrad.autograd.values.results import Results
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import as_token, from_token


@dataclasses.dataclass(eq=False)
class Pull:
    """A pull of the pullback for a recorded call's outermost derivative. The recording may hold further pullbacks.

    Operands: the call's tag, the call's operands, and the cotangents of its live results. ``live`` numbers the results
    that have a cotangent, among the differentiable ones. Outputs: cotangents of the operands of the derivative.
    """

    call: Call
    live: tuple[int, ...]
    last: bool = False
    maps: tuple[Map, ...] = ()
    batches: tuple[tuple[int, tuple[bool, ...]], ...] = ()  # size, and which operands have it (none: it is mapped over)

    def start(self, operands: Sequence[Any]) -> Started:
        worker, (context, message, *_) = current_worker(), from_token(operands[0])
        scope = worker.scopes.find(context)
        scope.content(Tape).links.add(message, self.call.to, describe(self.call.function), backward=True)
        cotangents = list(operands[len(operands) - len(self.live) :])
        with within(scope):
            pulled = self.stop().task(None, (message, next_number()), next_place())
            timeout = self.patience(worker.timeout)
            return Started(worker.rpc_async(self.call.to, pulled, (cotangents,), {}, timeout), list)

    def stop(self) -> PullStop:
        return PullStop(describe(self.call.function), len(self.call.orders) - 1, self.live, self.last, self.maps)

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.call.orders[-1]

    def items(self) -> list[Operand]:
        """Return the cotangents, which follow the tag among the operands that ``needed`` leaves."""
        return [Operand(Hole(), (1 + k,)) for k in range(len(self.live))]

    def links(self, numbers: tuple[int, ...], caller: int, cause: int | None) -> list[Link]:
        """Return the links that the graph shows for a pull sent as a stop."""
        return [Link(numbers[0], caller, self.call.to, describe(self.call.function), backward=True, caused_by=cause)]

    def patience(self, default: float) -> float:
        """Return twice the call's patience: the pull may first have to wait for the call itself."""
        return 2 * self.call.patience(default)

    def __str__(self) -> str:
        return f"cotangents of {describe(self.call.function)} to rank {self.call.to}"

    @property
    def where(self) -> str:
        return self.call.where

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return [operands[0], *operands[len(operands) - len(self.live) :]]

    def shapes(self, operands: Shapes) -> Shapes:
        handles = self.call.handles()
        return [self._cotangent(1 + k, operands[1 + k], is_handle=k in handles) for k in self.wanted]

    def _cotangent(self, place: int, operand: jax.ShapeDtypeStruct, *, is_handle: bool) -> jax.ShapeDtypeStruct:
        """Return the shape of an operand's cotangent: a dimension for every batch, the latest first, before its own.

        The cotangent of a handle has dimensions only for the batches that the pullback is mapped over.
        """
        own = operand.shape[sum(flags[place] for _, flags in self.batches) :]
        sizes = (size for size, flags in reversed(self.batches) if not (is_handle and any(flags)))
        return operand.update(shape=(*sizes, *own))

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Batch the pull: the recording is batched if operands are, else its pullback is mapped over the batch."""
        first = len(batched) - len(self.live)
        own = (False, *batched[1:first])
        batches = (*self.batches, (size, own))
        if any(own):
            maps = tuple(dataclasses.replace(one, axis=one.axis + 1) for one in self.maps)
            pull = dataclasses.replace(self, maps=maps, batches=batches)
            handles = self.call.handles()
            outputs = [k not in handles for k in self.wanted]
            return Batched(pull, lambda count: outputs, tuple(range(first, len(batched))))
        maps = (*self.maps, Map(tuple(batched[first:]), 0, size))
        pull = dataclasses.replace(self, maps=maps, batches=batches)
        return Batched(pull, lambda count: [True] * count)

    def functional(self) -> Call:
        """Return the pull as a call of a function of the tag, a number and the operands, for derivatives of the pull.

        References are passed by reference: inside the function, gradients of their values go to their owners. When run
        again with the same number, the function makes the same contributions, which then count once.
        """
        arguments, count = self.call.arguments, len(self.live)
        args, kwargs = arguments.by_reference()
        first = 2 + len(list(trees.leaves(arguments.tree)))
        tree: Any = ((Hole(), Hole(), args, kwargs, *(Hole() for _ in self.live)), {})
        layout = Layout(tree, (0, 1, *(2 + k for k in arguments.positions), *range(first, first + count)))
        timeout = None if self.call.timeout is None else self.patience(self.call.timeout)
        return Call(self.call.to, self.call.pullback(self.live), layout, Results(), timeout)


@dataclasses.dataclass(eq=False)
class DrawNumber:
    """An operation that draws a fresh contribution id. Its operands only order the draw."""

    def __str__(self) -> str:
        return "nothing: a number"

    def start(self, operands: Sequence[Any]) -> Started:
        return done([as_token(next_number())])

    def shapes(self, operands: Shapes) -> Shapes:
        return [TOKEN_SHAPE]

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return operands

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return Batched(self, lambda count: [False])
