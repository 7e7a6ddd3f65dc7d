"""A function called on another worker, recorded or not, and what a recorded call holds: linear functions.

These are the pull of cotangents through the call, and the push of tangents.
"""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.derivatives import Orders
from jdistgrad.autograd.callee.functions import BatchedOf, PullbackOf, PushforwardOf, ShapesOf, is_pure, state_argument
from jdistgrad.autograd.callee.pullbacks import Map
from jdistgrad.autograd.callee.recording import CallStop, Lane, LinearStop
from jdistgrad.autograd.operations.messages import Crossing
from jdistgrad.autograd.tape.tape import Lease, current_tape, leased_context, next_message, next_number
from jdistgrad.autograd.values.holes import Hole, Layout, Operand, ReferenceHole, Results, as_jax, is_differentiable
from jdistgrad.autograd.values.primitive import TAG_SHAPE, TOKEN_SHAPE, Batched, Operation, Shapes, Started, done
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.server import replace_unmade
from jdistgrad.rpc.traced_hook import staging
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import as_token, from_token

NO_CONTEXT = -1
NOT_RECORDED = as_token(NO_CONTEXT, 0)


@dataclasses.dataclass(eq=False)
class Call(Crossing):
    """A function called on a worker. ``orders``: for each derivative that is taken, the operands it is taken of.

    Outputs: the arrays among the function's results, and before them, if there are orders, the tag.

    A call with orders is recorded in the current context, and the tag names the recording. Outside any context, JAX
    decides how long a recording is needed. Evaluated now, the call opens a context, which closes when the last
    operation that may use the tag is gone: they share the list ``leases``. In compiled code there is no such moment, so
    the call is not recorded, its tag is NOT_RECORDED, and a pull or a push runs the function again.
    """

    to: int
    function: Any
    arguments: Layout
    results: Results
    timeout: float | None = None
    orders: Orders = ()
    lanes: tuple[Lane, ...] = ()
    where: str = ""  # the place of the call in the user's program
    leases: list[Lease] = dataclasses.field(default_factory=list)
    results_come_here: ClassVar[bool] = True
    reads = True

    def __str__(self) -> str:
        return f"{describe(self.function)} to rank {self.to}{', recorded' if self.orders else ''}"

    def recording(self, wanted: Sequence[int]) -> "Call":
        """Return the same call, recorded for one more derivative: that of the call as it is recorded so far."""
        leases = self.leases if self.orders or self.leases else []
        return dataclasses.replace(self, orders=(*self.orders, tuple(sorted(wanted))), leases=leases)

    def evaluated(self, operands: Sequence[Any]) -> list[Any]:
        if not self.orders or current_scope() is not None or self.differentiates_references:
            return super().evaluated(operands)
        with leased_context(self.leases):
            return super().evaluated(operands)

    @property
    def is_recorded(self) -> bool:
        """Return whether the call is recorded now. References and state can be recorded in a context only."""
        if not self.orders or current_scope() is not None:
            return bool(self.orders)
        return self.differentiates_references or self.state is not None

    @property
    def differentiates_references(self) -> bool:
        return not self.results_come_here or any(map(self.handles().intersection, self.orders))

    def released(self) -> "Call":
        """Return the same call for JAX 0.10, which keeps calls for ever: the tape keeps the values alive instead.

        Outside any context, compiled code has no tape, and keeps the values that it is called with.
        """
        if staging():
            return self
        arguments, claims = self.arguments.released()
        if claims and not self.leases and current_scope() is None:
            return self
        if claims:
            with leased_context(self.leases) if self.leases else contextlib.nullcontext():
                current_tape(lambda: describe(self.function)).kept.extend(claims)
        return dataclasses.replace(self, arguments=arguments)

    def start(self, operands: Sequence[Any]) -> Started:
        """Send the call as the user made it: mostly, only the answer tells the structure of its result."""
        results, numbers = self.results, self.drawn(operands)
        orders = self.leaves() if numbers else ()
        stop = CallStop(None, orders, self.lanes, len(results.shapes) if results.have_keys else None)
        finish = results.flatten if stop.count is None else lambda arrays: as_jax(results.counted(arrays))
        return self.as_made(stop, numbers, operands if numbers else self.in_lanes(operands), finish)

    def as_made(
        self, stop: CallStop, numbers: tuple[int, ...], operands: Sequence[Any], finish: Callable[[Any], list[Any]]
    ) -> Started:
        args, kwargs = self.arguments.fill(operands)
        return self.alone(stop, self.function, numbers, [args, kwargs] if kwargs else [args], finish)

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        return (next_message(),) if self.is_recorded else ()

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        if not self.orders:
            return []
        scope = current_scope() if numbers else None
        return [NOT_RECORDED if scope is None else as_token(scope.id, *numbers)]

    def in_lanes(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands with the lanes that the callee adds to those of a recorded call."""
        given = list(operands)
        for lane, k in ((lane, self.arguments.positions.index(lane.leaf)) for lane in self.lanes):
            numpy: Any = jnp if isinstance(given[k], jax.core.Tracer) else np
            given[k] = numpy.broadcast_to(numpy.expand_dims(given[k], lane.axis), lane.shape(np.shape(given[k])))
        return given

    @property
    def records(self) -> bool:
        return bool(self.orders)

    first = needs_context = records  # the tag

    @property
    def waits_for_nothing(self) -> bool:
        """Return whether the function is pure by contract, its arguments of known types, and its timeout the default.

        Functions that run as written may wait for anything, and other operations must not wait with them. Calls that
        make or return references run at their own time.
        """
        if not is_pure(self.function) or self.timeout is not None or not self.arguments.is_plain:
            return False
        known = self.results.known
        return known is not None and not known[0].has_references

    def leaves(self) -> Orders:
        return tuple(tuple(self.arguments.positions[k] for k in order) for order in self.orders)

    def stop(self) -> tuple[CallStop, list[Any]]:
        arguments, closed = self.arguments, not self.arguments.has_references
        stop = CallStop(arguments.emptied(), self.leaves(), self.lanes, len(self.results.shapes), closed)
        return stop, arguments.items()

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

    def batched(self, size: int, batched: Sequence[bool]) -> "tuple[Call, Sequence[int], Sequence[int]]":
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


@dataclasses.dataclass(eq=False)
class Linear(Crossing):
    """A linear function that a recorded call holds: the pullback of its outermost derivative, or its transpose.

    Operands: the call's tag, the call's operands, and the inputs of the linear function.
    """

    call: Call
    numbers: tuple[int, ...]  # of the inputs: among the differentiable results for a pull, the operands for a push
    maps: tuple[Map, ...] = ()
    batches: tuple[tuple[int, tuple[bool, ...]], ...] = ()  # size, and which operands have it (none: it is mapped over)
    follows_tag: ClassVar[bool] = True
    moves: ClassVar[str]
    function, times = None, 2  # the answer may first have to wait for the call itself

    def __post_init__(self) -> None:
        self.inputs, self.to, self.where = len(self.numbers), self.call.to, self.call.where
        self.timeout = self.call.timeout

    def __str__(self) -> str:
        return f"{self.moves} of {describe(self.call.function)} to rank {self.to}"

    @property
    def has_references(self) -> bool:
        return self.call.has_references

    def stop(self) -> tuple[LinearStop, list[Any]]:
        live, last = (self.numbers, self.last) if isinstance(self, Pull) else (None, False)
        stop = LinearStop(describe(self.call.function), len(self.call.orders) - 1, live, self.maps, last)
        return stop, [Operand(Hole(), (1 + k,)) for k in range(self.inputs)]  # of the needed operands

    def start(self, operands: Sequence[Any]) -> Started:
        context, *_ = from_token(operands[0])
        if context == NO_CONTEXT:
            number = [as_token(next_number())] if isinstance(self, Pull) else []
            return self.again.start([operands[0], *number, *operands[1:]])
        with within(current_worker().scopes.find(context)):
            return super().start(self.needed(operands))

    @functools.cached_property
    def again(self) -> Call:
        """Return the call that stands for the linear function of a call without a recording: it runs the function."""
        call, maps = dataclasses.replace(self, maps=(), batches=()).functional(), iter(self.maps)
        number = [False] if isinstance(self, Pull) else []
        for size, own in self.batches:
            inputs = self.in_batches()[0] if any(own) else next(maps).flags
            call = call.batched(size, [False, *number, *own[1:], *inputs])[0]
        return call

    def drawn(self, operands: Sequence[Any], message: int | None = None) -> tuple[int, ...]:
        if message is None:
            _, message, *_ = from_token(operands[0])
        if isinstance(self, Pull):
            return message, next_number()
        self.refuse_references()
        return (message,)

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return [operands[0], *operands[len(operands) - self.inputs :]]

    def in_batches(self) -> tuple[list[bool], list[bool]]:
        """Return which inputs, and which outputs, have a dimension for a batch of the recording: all but handles."""
        handles = self.call.handles()
        operands = [k not in handles for k in self.call.orders[-1]]
        if isinstance(self, Pull):
            return [True] * self.inputs, operands
        return operands, [True] * len(self.call.tangent_shapes())

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Batch the function: the recording is batched if operands are, else the function is mapped over the batch."""
        self._refuse_differing(batched)
        first = len(batched) - self.inputs
        own = (False, *batched[1:first])
        batches = (*self.batches, (size, own))
        if any(own):
            maps = tuple(dataclasses.replace(one, axis=one.axis + 1) for one in self.maps)
            inputs, outputs = self.in_batches()
            operation = dataclasses.replace(self, maps=maps, batches=batches)
            spread = [first + k for k, flag in enumerate(inputs) if flag]
            return operation, [k for k, flag in enumerate(outputs) if not flag], spread
        maps = (*self.maps, Map(tuple(batched[first:]), 0, size))
        return dataclasses.replace(self, maps=maps, batches=batches), (), ()

    def _refuse_differing(self, batched: Sequence[bool]) -> None:
        """Raise DifferentiationError for a recording, or a reference, that differs over the batch.

        JAX makes it so in a cond whose condition differs over the batch: elements that do not take the branch have
        anything in place of the tag, also that of a call in another branch. In a while_loop whose condition differs,
        elements that have left it keep the tag of an earlier call.
        """
        references = {1 + k for k in self.call.handles() & {*self.call.orders[-1]}}
        if any(batched[k] for k in {0} | references):
            raise DifferentiationError(
                f"no derivative is known for {self} in a branch of jax.lax.cond or switch, or in a while_loop, whose "
                "condition differs over the batch of jax.vmap, if references are differentiated, or if vmap is outside "
                "of the derivative. JAX runs all branches there: call outside of them, and choose by jnp.where; or map "
                "by jax.lax.map. Without references, jax.grad(lambda xs: jax.vmap(f)(xs).sum()) has the gradients of "
                "jax.vmap(jax.grad(f)), too."
            )

    def over_batches(self, function: Callable[..., Any], linear: "Linear") -> Any:
        """Map ``linear``, as a function of the tag, the operands and its inputs, over the batches of this one."""
        inputs, outputs = linear.in_batches()
        for size, own in self.batches:
            recorded = any(own)
            axes = [0 if flag else None for flag in own]
            axes += [0 if flag or not recorded else None for flag in inputs]
            results = tuple(0 if flag or not recorded else None for flag in outputs)
            function = jax.vmap(function, axes, results, axis_size=size)
        return function

    def summed(self, number: int, found: Any) -> Any:
        """Return an input's cotangent, summed over the batches that the input does not have."""
        turns = [turn for turn, (_, own) in enumerate(self.batches) if not any(own)]
        missing = [turn for turn, one in zip(turns, self.maps, strict=True) if not one.flags[number]]
        return found.sum([len(self.batches) - 1 - turn for turn in missing]) if missing else found

    def functional(self) -> Call:
        """Return the linear function as a call, for its derivatives.

        It is a call of a function of the tag, a number for a pull, the operands and the inputs. When run again with the
        same number, the function makes the same contributions, which then count once. References are passed by
        reference: inside the function, gradients of their values go to their owners.
        """
        if isinstance(self, Pull):
            function, extra = self.call.pullback(self.numbers), 2
        else:
            self.refuse_references()
            function, extra = PushforwardOf(self.call.function, self.call.leaves()), 1
        arguments = self.call.arguments
        args, kwargs = arguments.by_reference()
        first = extra + len(list(trees.leaves(arguments.tree)))
        holes = [Hole() for _ in range(extra)]
        tree: Any = ((*holes, args, kwargs, *(Hole() for _ in range(self.inputs))), {})
        inputs = range(first, first + self.inputs)
        layout = Layout(tree, (*range(extra), *(extra + k for k in arguments.positions), *inputs))
        timeout = None if self.timeout is None else self.patience(self.timeout)
        return Call(self.to, function, layout, Results(), timeout, leases=self.call.leases or [])

    def refuse_references(self) -> None:
        """Raise DifferentiationError for tangents of references: these stand for values on other workers."""
        if self.call.handles() & set(self.call.orders[-1]) or not self.call.results_come_here:
            raise DifferentiationError(
                f"{describe(self.call.function)} has no forward-mode derivative (jvp, jacfwd, linearize, hessian) that "
                "passes through a reference. Use reverse mode: jax.vjp, jax.grad, jax.jacrev, and "
                "jax.jacrev(jax.jacrev(f)) for a Hessian. Or pass values instead of references."
            )


@dataclasses.dataclass(eq=False)
class Pull(Linear):
    """A pull of the pullback. The recording may hold further pullbacks, unless this is its ``last`` pull.

    Inputs: the cotangents of its live results. Outputs: those of the operands of the derivative.
    """

    last: bool = False
    moves, pulls = "cotangents", True

    @property
    def contributes(self) -> bool:
        return not self.call.handles().isdisjoint(self.call.orders[-1])

    def shapes(self, operands: Shapes) -> Shapes:
        """Return the shapes of cotangents: a dimension for every batch, the latest first, before the operand's own.

        The cotangent of a handle has dimensions only for the batches that the pullback is mapped over.
        """
        handles, found = self.call.handles(), []
        for k in self.call.orders[-1]:
            own = operands[1 + k].shape[sum(flags[1 + k] for _, flags in self.batches) :]
            sizes = (size for size, flags in reversed(self.batches) if not (k in handles and any(flags)))
            found.append(operands[1 + k].update(shape=(*sizes, *own)))
        return found


@dataclasses.dataclass(eq=False)
class Push(Linear):
    """A push of tangents through a recorded call, by the transpose of its pullback.

    Inputs: the tangents of the operands of the derivative. Outputs: those of all differentiable results.
    """

    moves = "tangents"

    def shapes(self, operands: Shapes) -> Shapes:
        sizes = [size for size, _ in reversed(self.batches)]
        return [one.update(shape=(*sizes, *one.shape)) for one in self.call.tangent_shapes()]


@dataclasses.dataclass(eq=False)
class DrawNumber(Operation):
    """An operation that draws a fresh contribution id. Its operands only order the draw."""

    has_references: ClassVar[bool] = False
    title = "nothing: a number"

    def start(self, operands: Sequence[Any]) -> Started:
        return done([as_token(next_number())])

    def shapes(self, operands: Shapes) -> Shapes:
        return [TOKEN_SHAPE]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return self, (0,), ()


def where() -> str:
    """Return the current place in the user's program, for errors that are raised when traced code runs."""
    for frame, line in traceback.walk_stack(None):
        if not str(frame.f_globals.get("__name__", "")).startswith(("jdistgrad.", "jax.", "contextlib", "functools")):
            return f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    return "an unknown place"
