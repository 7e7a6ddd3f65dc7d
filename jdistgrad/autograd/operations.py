"""What crosses the boundary: a call, recorded or not, and the pull of its pullback.

An operation has operands and outputs, all of them arrays. It can be started on concrete operands, and knows the shapes
of its outputs and how it is batched.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jdistgrad.autograd.compiling import Map
from jdistgrad.autograd.derived import BatchedOf, PullbackOf, ShapesOf
from jdistgrad.autograd.layout import Hole, Layout, ReferenceHole
from jdistgrad.autograd.order import next_place
from jdistgrad.autograd.recording import Lane, Pulled, Recorded
from jdistgrad.autograd.results import Results
from jdistgrad.autograd.tape import Tape, current_tape, next_message, next_number
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import current_scope, current_worker, within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.references import standing_in
from jdistgrad.wire.ids import as_token, from_token

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
        """The operands that ``start`` looks at: compiled code hands it no others."""

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """The operation over operands some of which begin with a batch dimension."""


@dataclasses.dataclass(eq=False)
class Call:
    """A function called on a worker. ``wanted``: the operands to record a pullback for; None: not recorded.

    Outputs: the arrays among its results; before them, where it is recorded, the tag that the pullback is found by.
    """

    to: int
    function: Any
    arguments: Layout
    results: Results
    timeout: float | None = None
    wanted: tuple[int, ...] | None = None
    lanes: tuple[Lane, ...] = ()
    where: str = ""  # in the user's program

    def __str__(self) -> str:
        return f"{describe(self.function)} to rank {self.to}{'' if self.wanted is None else ', recorded'}"

    def recording(self, wanted: Sequence[int]) -> "Call":
        return dataclasses.replace(self, wanted=tuple(sorted(wanted)))

    def start(self, operands: Sequence[Any]) -> Started:
        if self.wanted is None:
            return Started(self.send(self.function, operands), self.results.flatten)
        recorded, tag = self.recorded(self.function)
        future = self.send(recorded, operands)
        return Started(future, self.results.flatten, [as_token(*tag)])

    def send(self, function: Any, operands: Sequence[Any]) -> concurrent.futures.Future:
        args, kwargs = self.arguments.fill(operands)
        return current_worker().rpc_async(self.to, function, args, kwargs, self.timeout)

    def recorded(self, function: Any) -> tuple[Recorded, tuple[int, int]]:
        """The function to send where its pullback shall be kept; and where it will be: context and message."""
        message, tape = next_message(), current_tape(lambda: f"{describe(self.function)} on worker {self.to}")
        tape.link(message, self.to, describe(self.function))
        scope = current_scope()
        assert scope is not None
        assert self.wanted is not None
        positions = tuple(self.arguments.positions[k] for k in self.wanted)
        return Recorded(function, message, positions, next_place(), self.lanes), (scope.id, message)

    def handles(self) -> set[int]:
        """Which operands are references' handles."""
        return {k for k, hole in enumerate(self.arguments.holes()) if isinstance(hole, ReferenceHole)}

    def pullback(self, wanted: tuple[int, ...], live: tuple[int, ...]) -> Any:
        """The pullback as a function."""
        return PullbackOf(self.function, wanted, live)

    def shapes(self, operands: Shapes) -> Shapes:
        if self.results.known is None:
            args, kwargs = trees.map_leaves(standing_in, self.arguments.fill(self._with_lanes(operands)))
            self.results.learn(current_worker().rpc_sync(self.to, ShapesOf(self.function), args, kwargs, None))
        return [TAG, *self.results.shapes] if self.wanted is not None else self.results.shapes

    def _with_lanes(self, operands: Shapes) -> Shapes:
        found = list(operands)
        for lane in self.lanes:
            found = [
                jax.ShapeDtypeStruct(lane.shape(one.shape), one.dtype) if where == lane.leaf else one
                for where, one in zip(self.arguments.positions, found, strict=True)
            ]
        return found

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return operands

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Of what is recorded, each lane has a pullback of its own: the wanted operands get lanes at the callee."""
        positions, paths = self.arguments.positions, list(trees.paths(self.arguments.tree))
        given = {positions[k] for k, flag in enumerate(batched) if flag}
        spread = sorted({positions[k] for k in {*(self.wanted or ())} - self.handles()} - given)
        function = BatchedOf(self.function, tuple(paths[where] for where in sorted({*given, *spread})), size)
        behind = (dataclasses.replace(one, axis=one.axis + (one.leaf in given)) for one in self.lanes)
        lanes = (*behind, *(Lane(where, 0, size) for where in spread))
        call = dataclasses.replace(self, function=function, results=self.results.batched(), lanes=lanes)
        plain = 0 if self.wanted is None else 1
        return Batched(call, lambda count: [k >= plain for k in range(count)])


@dataclasses.dataclass(eq=False)
class Pull:
    """The pullback of a recorded call. Operands: the call's tag, its own operands, and the cotangents of those of its
    results (numbered among the differentiable ones) that have any. Outputs: cotangents of the wanted operands."""

    call: Call
    wanted: tuple[int, ...]
    live: tuple[int, ...]
    last: bool = False
    maps: tuple[Map, ...] = ()
    batches: tuple[tuple[int, tuple[bool, ...]], ...] = ()  # size, and which operands have it (none: it is mapped)

    def start(self, operands: Sequence[Any]) -> Started:
        tag, cotangents = operands[0], operands[len(operands) - len(self.live) :]
        scope_id, message, *_ = from_token(tag)
        worker, call = current_worker(), self.call
        scope = worker.scopes.find(scope_id)
        scope.content(Tape).link(message, call.to, describe(call.function), backward=True)
        assert call.wanted is not None
        numbers = tuple(call.wanted.index(k) for k in self.wanted)
        with within(scope):
            pulled = Pulled(
                describe(call.function), message, next_number(), numbers, self.live, self.last, self.maps, next_place()
            )
            return Started(
                worker.rpc_async(call.to, pulled, (list(cotangents),), {}, self._timeout(worker.timeout)), list
            )

    def _timeout(self, default: float) -> float:
        """It may have to wait for the call itself, which then has its own time."""
        return default + (default if self.call.timeout is None else self.call.timeout)

    def __str__(self) -> str:
        return f"cotangents of {describe(self.call.function)} to rank {self.call.to}"

    @property
    def where(self) -> str:
        return self.call.where

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return [operands[0], *operands[len(operands) - len(self.live) :]]

    def shapes(self, operands: Shapes) -> Shapes:
        handles = self.call.handles()
        return [self._cotangent(1 + k, operands[1 + k], k in handles) for k in self.wanted]

    def _cotangent(self, place: int, operand: jax.ShapeDtypeStruct, is_handle: bool) -> jax.ShapeDtypeStruct:
        """Every batch is a dimension of it, the latest first; of a handle's, only those that are mapped."""
        own = operand.shape[sum(flags[place] for _, flags in self.batches) :]
        sizes = (size for size, flags in reversed(self.batches) if not (is_handle and any(flags)))
        return jax.ShapeDtypeStruct((*sizes, *own), operand.dtype)

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Where operands are batched, so is what was recorded. Else the recorded pullback is mapped over a batch."""
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
        """The same as a call of a function of the tag, a number, and the operands: what derivatives are taken of.

        References stand in its arguments by themselves: their values' gradients go to their owners inside. Run again
        with the same number, it makes the same contributions: they count once.
        """
        arguments, count = self.call.arguments, len(self.live)
        positions = tuple(arguments.positions[k] for k in self.wanted)
        args, kwargs = arguments.by_reference()
        first = 2 + len(list(trees.leaves(arguments.tree)))
        tree: Any = ((Hole(), Hole(), args, kwargs, *(Hole() for _ in self.live)), {})
        layout = Layout(tree, (0, 1, *(2 + k for k in arguments.positions), *range(first, first + count)))
        return Call(self.call.to, self.call.pullback(positions, self.live), layout, Results())


@dataclasses.dataclass(eq=False)
class Number:
    """A new number of this worker's. Its operands only say when it is made."""

    def __str__(self) -> str:
        return "nothing: a number"

    def start(self, operands: Sequence[Any]) -> Started:
        return done([as_token(next_number())])

    def shapes(self, operands: Shapes) -> Shapes:
        return [TOKEN]

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return operands

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return Batched(self, lambda count: [False])


def done(outputs: list[Any]) -> Started:
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result(outputs)
    return Started(future, list)


def nothing_more(answer: Any) -> list[Any]:
    """The outputs that an answer brings where all were known before."""
    return []
