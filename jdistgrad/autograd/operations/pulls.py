"""The linear functions that a recorded call holds: the pull of cotangents, and the push of tangents."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax

from jdistgrad.autograd.callee.bundle import PullStop
from jdistgrad.autograd.callee.functions import PushforwardOf
from jdistgrad.autograd.callee.pullbacks import Map
from jdistgrad.autograd.callee.recording import PushCall
from jdistgrad.autograd.operations.calls import Call
from jdistgrad.autograd.tape.links import next_place
from jdistgrad.autograd.tape.tape import current_tape, next_number
from jdistgrad.autograd.values.holes import Hole, Layout, Operand
from jdistgrad.autograd.values.primitive import TOKEN_SHAPE, Batched, Operation, Shapes, Started, done
from jdistgrad.autograd.values.results import Results
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import as_token, from_token


@dataclasses.dataclass(eq=False)
class Linear(Operation):
    """A linear function that a recorded call holds: the pullback of its outermost derivative, or its transpose.

    Operands: the call's tag, the call's operands, and the inputs of the linear function.
    """

    call: Call
    maps: tuple[Map, ...] = ()
    batches: tuple[tuple[int, tuple[bool, ...]], ...] = ()  # size, and which operands have it (none: it is mapped over)
    follows_tag: ClassVar[bool] = True

    @property
    def inputs(self) -> int:
        raise NotImplementedError

    @property
    def wanted(self) -> tuple[int, ...]:
        return self.call.orders[-1]

    @property
    def has_references(self) -> bool:
        return self.call.has_references

    def task(self, message: int) -> Any:
        """Return the function to send, in the context of the call, given the call's message."""
        raise NotImplementedError

    def start(self, operands: Sequence[Any]) -> Started:
        worker, (context, message, *_) = current_worker(), from_token(operands[0])
        inputs = list(operands[len(operands) - self.inputs :])
        with within(worker.scopes.find(context)):
            timeout = self.patience(worker.timeout)
            return Started(worker.rpc_async(self.call.to, self.task(message), (inputs,), {}, timeout), list)

    def patience(self, default: float) -> float:
        """Return twice the call's patience: the answer may first have to wait for the call itself."""
        return 2 * self.call.patience(default)

    @property
    def where(self) -> str:
        return self.call.where

    def needed(self, operands: Sequence[Any]) -> Sequence[Any]:
        return [operands[0], *operands[len(operands) - self.inputs :]]

    def functional(self) -> Call:
        """Return the linear function as a call, for its derivatives."""
        raise NotImplementedError

    def inputs_in_batches(self) -> list[bool]:
        """Return which inputs have a dimension for a batch of the recording."""
        return [True] * self.inputs

    def outputs_in_batches(self) -> list[bool]:
        raise NotImplementedError

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        """Batch the function: the recording is batched if operands are, else the function is mapped over the batch."""
        self._refuse_differing(batched)
        first = len(batched) - self.inputs
        own = (False, *batched[1:first])
        batches = (*self.batches, (size, own))
        if any(own):
            maps = tuple(dataclasses.replace(one, axis=one.axis + 1) for one in self.maps)
            outputs = self.outputs_in_batches()
            operation = dataclasses.replace(self, maps=maps, batches=batches)
            spread = tuple(first + k for k, flag in enumerate(self.inputs_in_batches()) if flag)
            return Batched(operation, lambda count: outputs, spread)
        maps = (*self.maps, Map(tuple(batched[first:]), 0, size))
        operation = dataclasses.replace(self, maps=maps, batches=batches)
        return Batched(operation, lambda count: [True] * count)

    def _refuse_differing(self, batched: Sequence[bool]) -> None:
        """Raise DifferentiationError for a recording, or a reference, that differs over the batch.

        JAX makes it so in a cond whose condition differs over the batch: elements that do not take the branch have
        anything in place of the tag, also that of a call in another branch. In a while_loop whose condition differs,
        elements that have left it keep the tag of an earlier call.
        """
        references = {1 + k for k in self.call.handles() & {*self.wanted}}
        if any(batched[k] for k in {0} | references):
            raise DifferentiationError(
                f"no derivative is known for {self} in a branch of jax.lax.cond or switch, or in a while_loop, whose "
                "condition differs over the batch of jax.vmap, if references are differentiated, or if vmap is outside "
                "of the derivative. JAX runs all branches there: call outside of them, and choose by jnp.where; or map "
                "by jax.lax.map. Without references, jax.grad(lambda xs: jax.vmap(f)(xs).sum()) has the gradients of "
                "jax.vmap(jax.grad(f)), too."
            )

    def over_batches(self, function: Callable[..., Any], inputs: Sequence[bool], outputs: Sequence[bool]) -> Any:
        """Map a function of the tag, the operands and some inputs over the batches of this one.

        Arguments:
          inputs, outputs: which inputs and outputs have a dimension for a batch of the recording.
        """
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

    def _function(self, function: Any, *, numbered: bool) -> Call:
        """Return a function of the tag, perhaps a number, the operands and the inputs as a call.

        References are passed by reference: inside the function, gradients of their values go to their owners.
        """
        arguments, extra = self.call.arguments, 1 + numbered
        args, kwargs = arguments.by_reference()
        first = extra + len(list(trees.leaves(arguments.tree)))
        holes = [Hole() for _ in range(extra)]
        tree: Any = ((*holes, args, kwargs, *(Hole() for _ in range(self.inputs))), {})
        inputs = range(first, first + self.inputs)
        layout = Layout(tree, (*range(extra), *(extra + k for k in arguments.positions), *inputs))
        timeout = None if self.call.timeout is None else self.patience(self.call.timeout)
        return Call(self.call.to, function, layout, Results(), timeout)


@dataclasses.dataclass(eq=False)
class Pull(Linear):
    """A pull of the pullback. The recording may hold further pullbacks.

    Inputs: the cotangents of its live results. ``live`` numbers the results that have a cotangent, among the
    differentiable ones. Outputs: cotangents of the operands of the derivative.
    """

    live: tuple[int, ...] = ()
    last: bool = False

    @property
    def inputs(self) -> int:
        return len(self.live)

    def task(self, message: int) -> Any:
        tape = current_tape(lambda: str(self))
        tape.links.add(message, self.call.to, describe(self.call.function), backward=True)
        return self.stop().task(None, (message, next_number()), next_place())

    def stop(self) -> PullStop:
        return PullStop(describe(self.call.function), len(self.call.orders) - 1, self.live, self.last, self.maps)

    def items(self) -> list[Operand]:
        """Return the cotangents, which follow the tag among the operands that ``needed`` leaves."""
        return [Operand(Hole(), (1 + k,)) for k in range(len(self.live))]

    def __str__(self) -> str:
        return f"cotangents of {describe(self.call.function)} to rank {self.call.to}"

    def shapes(self, operands: Shapes) -> Shapes:
        """Return the shapes of cotangents: a dimension for every batch, the latest first, before the operand's own.

        The cotangent of a handle has dimensions only for the batches that the pullback is mapped over.
        """
        handles, found = self.call.handles(), []
        for k in self.wanted:
            own = operands[1 + k].shape[sum(flags[1 + k] for _, flags in self.batches) :]
            sizes = (size for size, flags in reversed(self.batches) if not (k in handles and any(flags)))
            found.append(operands[1 + k].update(shape=(*sizes, *own)))
        return found

    def outputs_in_batches(self) -> list[bool]:
        handles = self.call.handles()
        return [k not in handles for k in self.wanted]

    def functional(self) -> Call:
        """Return the pull as a call of a function of the tag, a number and the operands, for derivatives of the pull.

        When run again with the same number, the function makes the same contributions, which then count once.
        """
        return self._function(self.call.pullback(self.live), numbered=True)

    def transposed(self) -> "Push":
        """Return the transpose, without the batches."""
        return Push(self.call)


@dataclasses.dataclass(eq=False)
class Push(Linear):
    """A push of tangents through a recorded call, by the transpose of its pullback.

    Inputs: the tangents of the operands of the derivative. Outputs: those of all differentiable results.
    """

    @property
    def inputs(self) -> int:
        return len(self.wanted)

    def task(self, message: int) -> Any:
        self._refuse_references()
        what, order = describe(self.call.function), len(self.call.orders) - 1
        return PushCall(what, message, order, self.maps, next_place())

    def _refuse_references(self) -> None:
        """Raise DifferentiationError for tangents of references: these stand for values on other workers."""
        if self.call.handles() & set(self.wanted) or not self.call.results_come_here:
            raise DifferentiationError(
                f"{describe(self.call.function)} has no forward-mode derivative (jvp, jacfwd, linearize, hessian) that "
                "passes through a reference. Use reverse mode: jax.vjp, jax.grad, jax.jacrev, and "
                "jax.jacrev(jax.jacrev(f)) for a Hessian. Or pass values instead of references."
            )

    def __str__(self) -> str:
        return f"tangents of {describe(self.call.function)} to rank {self.call.to}"

    def shapes(self, operands: Shapes) -> Shapes:
        sizes = [size for size, _ in reversed(self.batches)]
        return [one.update(shape=(*sizes, *one.shape)) for one in self.call.tangent_shapes()]

    def inputs_in_batches(self) -> list[bool]:
        handles = self.call.handles()
        return [k not in handles for k in self.wanted]

    def outputs_in_batches(self) -> list[bool]:
        return [True] * len(self.call.tangent_shapes())

    def functional(self) -> Call:
        """Return the push as a call of a function of the tag and the operands, for derivatives of the push."""
        self._refuse_references()
        return self._function(PushforwardOf(self.call.function, self.call.leaves()), numbered=False)

    def transposed(self, live: tuple[int, ...]) -> Pull:
        """Return the transpose, without the batches."""
        return Pull(self.call, live=live)


@dataclasses.dataclass(eq=False)
class DrawNumber(Operation):
    """An operation that draws a fresh contribution id. Its operands only order the draw."""

    has_references: ClassVar[bool] = False

    def __str__(self) -> str:
        return "nothing: a number"

    def start(self, operands: Sequence[Any]) -> Started:
        return done([as_token(next_number())])

    def shapes(self, operands: Shapes) -> Shapes:
        return [TOKEN_SHAPE]

    def batched(self, size: int, batched: Sequence[bool]) -> Batched:
        return Batched(self, lambda count: [False])
