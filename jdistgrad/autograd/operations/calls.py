"""A function called on another worker, recorded or not."""

import concurrent.futures
import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from jdistgrad.autograd.callee.bundle import send_alone
from jdistgrad.autograd.callee.functions import BatchedOf, PullbackOf, ShapesOf
from jdistgrad.autograd.callee.orders import Orders
from jdistgrad.autograd.callee.recording import Lane
from jdistgrad.autograd.callee.state import state_argument
from jdistgrad.autograd.callee.stops import CallStop
from jdistgrad.autograd.operations.messages import Crossing
from jdistgrad.autograd.tape.tape import Link, current_tape, next_message
from jdistgrad.autograd.values.holes import Layout, ReferenceHole, Results, is_differentiable
from jdistgrad.autograd.values.primitive import TAG_SHAPE, Batched, Shapes, Started
from jdistgrad.autograd.values.typed import ArraysOf
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.server import replace_unmade
from jdistgrad.rpc.traced_hook import staging
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import as_token


@dataclasses.dataclass(eq=False)
class Call(Crossing):
    """A function called on a worker. ``orders``: for each derivative that is recorded, the operands it is taken of.

    Without orders, the call is not recorded. Outputs: the arrays among the function's results, and before them, if
    the call is recorded, the tag under which its pullback is found.
    """

    to: int
    function: Any
    arguments: Layout
    results: Results
    timeout: float | None = None
    orders: Orders = ()
    lanes: tuple[Lane, ...] = ()
    where: str = ""  # the place of the call in the user's program
    results_come_here: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{describe(self.function)} to rank {self.to}{', recorded' if self.orders else ''}"

    def recording(self, wanted: Sequence[int]) -> "Call":
        """Return the same call, recorded for one more derivative: that of the call as it is recorded so far."""
        return dataclasses.replace(self, orders=(*self.orders, tuple(sorted(wanted))))

    def released(self) -> "Call":
        """Return the same call for JAX to keep: what JAX keeps for ever must keep no value alive, so the tape does."""
        if staging():
            return self
        arguments, claims = self.arguments.released()
        if claims:
            current_tape(lambda: describe(self.function)).kept.extend(claims)
        return dataclasses.replace(self, arguments=arguments)

    def start(self, operands: Sequence[Any]) -> Started:
        plain = self.results.have_keys
        function = ArraysOf(self.function) if plain else self.function
        finish = self.results.arrived if plain else self.results.flatten
        numbers = self.noted(operands, lambda: f"{describe(self.function)} on worker {self.to}")
        return Started(self.send(function, numbers, operands), finish, self.known(numbers))

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        return (next_message(),) if self.orders else ()

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        scope = current_scope() if numbers else None
        return [] if scope is None else [as_token(scope.id, *numbers)]

    @property
    def first(self) -> int:
        return int(bool(self.orders))

    def link(self, numbers: tuple[int, ...], by: int | None) -> Link:
        return Link(numbers[0], current_worker().rank, self.to, describe(self.function), caused_by=by)

    def send(self, function: Any, numbers: tuple[int, ...], operands: Sequence[Any]) -> concurrent.futures.Future[Any]:
        """Send the call as it is made: the structure of its result is known from the answer only."""
        args, kwargs = self.arguments.fill(operands)
        stop, items = CallStop(orders=self.leaves(), lanes=self.lanes), [args, kwargs] if kwargs else [args]
        return send_alone(self.to, stop, items, self.timeout, function=function, numbers=numbers)

    def leaves(self) -> Orders:
        return tuple(tuple(self.arguments.positions[k] for k in order) for order in self.orders)

    # The methods for a call that is a stop of a bundle.

    def stop(self) -> CallStop:
        count, references = len(self.results.shapes), self.arguments.has_references
        return CallStop(self.arguments.emptied(), self.leaves(), self.lanes, count, references)

    def items(self) -> list[Any]:
        return self.arguments.items()

    def patience(self, default: float) -> float:
        return default if self.timeout is None else self.timeout

    @property
    def state(self) -> Any:
        """Return what identifies the state that the function changes, or None."""
        number = state_argument(self.function)
        if number is None:
            return None
        argument = self.arguments.tree[0][number]
        return argument.structure if isinstance(argument, ReferenceHole) else jax.tree.structure(argument.rref)

    def handles(self) -> set[int]:
        return {k for k, hole in enumerate(self.arguments.holes()) if isinstance(hole, ReferenceHole)}

    @property
    def has_references(self) -> bool:
        return self.arguments.has_references

    def pullback(self, live: tuple[int, ...]) -> Any:
        return PullbackOf(self.function, self.leaves(), live)

    def tangent_shapes(self) -> Shapes:
        """Return the shapes of the tangents of its results; results without derivatives have none."""
        return [one.update(weak_type=False) for one in self.results.shapes if is_differentiable(one)]

    def shapes(self, operands: Shapes) -> Shapes:
        if self.results.known is None:
            given = list(operands)
            for lane in self.lanes:
                for k, leaf in enumerate(self.arguments.positions):
                    if leaf == lane.leaf:
                        given[k] = jax.ShapeDtypeStruct(lane.shape(given[k].shape), given[k].dtype)
            args, kwargs = trees.map_leaves(replace_unmade, self.arguments.fill(given))
            worker = current_worker()
            time = max(worker.timeout, self.patience(worker.timeout))  # tracing may take longer than running
            self.results.learn(worker.rpc_sync(self.to, ShapesOf(self.function), args, kwargs, time))
        return [TAG_SHAPE, *self.results.shapes] if self.orders else self.results.shapes

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Batch the call. The callee adds a Lane to operands of a recorded call that are wanted and not batched.

        So each element of the batch has cotangents of its own. A reference is one value for all elements, also where
        JAX has repeated its handle, as in a cond whose condition differs over the batch.
        """
        positions, paths = self.arguments.positions, list(trees.paths(self.arguments.tree))
        handles = self.handles()
        given = {positions[k] for k, flag in enumerate(batched) if flag and k not in handles}
        spread = sorted({positions[k] for order in self.orders for k in {*order} - handles} - given)
        function = BatchedOf(self.function, tuple(paths[where] for where in sorted({*given, *spread})), size)
        behind = (dataclasses.replace(one, axis=one.axis + (one.leaf in given)) for one in self.lanes)
        lanes = (*behind, *(Lane(where, 0, size) for where in spread))
        call = dataclasses.replace(self, function=function, results=Results(self.results), lanes=lanes)
        return call, (0,) if self.orders else (), ()


def where() -> str:
    """Return the current place in the user's program, for errors that are raised when traced code runs."""
    for frame, line in traceback.walk_stack(None):
        if not str(frame.f_globals.get("__name__", "")).startswith(("jdistgrad.", "jax.", "contextlib", "functools")):
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return "an unknown place"
