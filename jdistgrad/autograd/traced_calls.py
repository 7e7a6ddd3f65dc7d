"""Calls with traced arguments: ``rpc_sync`` and the other calls inside grad, vmap and jit.

Also those whose result stays on the callee: the owner pulls once the whole gradient has arrived.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdistgrad.autograd.callee.derivatives import Orders, pulled
from jdistgrad.autograd.callee.functions import MadeOf, is_pure, plain, pulled_back
from jdistgrad.autograd.callee.recording import CallStop
from jdistgrad.autograd.operations import rules
from jdistgrad.autograd.operations.calls import Call, where
from jdistgrad.autograd.operations.owned_values import Fetch, Publish, Take
from jdistgrad.autograd.tape.ledger import REFERENCE
from jdistgrad.autograd.tape.tape import current_tape, replaying
from jdistgrad.autograd.values.holes import Layout, Results, is_array, operands_of, split
from jdistgrad.autograd.values.primitive import TOKEN_SHAPE, Operation, Shapes, Started
from jdistgrad.rpc import traced_hook, trees
from jdistgrad.rpc.claims import StandIn
from jdistgrad.rpc.functions import Args, Kwargs, describe
from jdistgrad.rpc.futures import done_future
from jdistgrad.rpc.handles import NO_MARKS, with_marks
from jdistgrad.rpc.owned import WHOLE
from jdistgrad.rpc.rref import RRef, staged_reference
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

    results_come_here = waits_for_nothing = False
    has_references = needs_context = True
    batched = Operation.batched  # type: ignore[assignment]
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
        numbers = *self.drawn(operands), claim.id
        stop = CallStop(None, self.leaves(), self.lanes, publishes=True)
        started = self.as_made(stop, numbers, operands, lambda _: [])
        claim.add(WHOLE)
        return started

    def known(self, numbers: tuple[int, ...]) -> list[Any]:
        tag = [as_token(*from_token(*super().known(numbers[:1])), numbers[-1])] if self.orders else []
        return [*tag, NO_MARKS, as_token(numbers[-1])]

    def shapes(self, operands: Shapes) -> Shapes:
        super().shapes(operands)
        return [*([REMOTE_TAG] if self.orders else []), MARKS_SHAPE, TOKEN_SHAPE]

    def tangent_shapes(self) -> Shapes:
        return [MARKS_SHAPE]

    def pullback(self, live: tuple[int, ...]) -> Any:
        return PullbackAtOwner(self.function, self.leaves())


@dataclasses.dataclass(frozen=True)
class PullbackAtOwner(MadeOf):
    """The pullback of a function whose result stayed here. It takes the result's cotangent from the owner's ledger."""

    orders: Orders
    title = "the pullback of {}"

    def __call__(self, tag: Any, number: Any, args: Any, kwargs: Any, handle: Any) -> list[Any]:
        results, pullback = pulled_back(tag, self.function, self.orders, None, args, kwargs)
        shapes = tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in results)
        numbers = tuple(range(len(shapes)))
        gradient = Take(current_worker().rank, REFERENCE, numbers, len(shapes), shapes)
        with replaying(number):
            _, *cotangents = rules.take(gradient)(handle, tag[4:])
            return pulled(pullback, cotangents)


class TracedCalls:
    def rpc_sync(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        call, operands = _to_trace(to, function, args, kwargs)
        operation = Call(*call, timeout, where=where())
        return operation.results.rebuild(rules.with_tangents(operation)(*operands))

    def rpc_async(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        """Make the call at once and return a future that is done. The staged step sends such calls together."""
        return done_future(functools.partial(self.rpc_sync, to, function, args, kwargs, timeout))

    def remote(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> RRef[Any]:
        call, operands = _to_trace(to, function, args, kwargs)
        operation = CallRemote(*call, timeout, where=where(), staged=traced_hook.staging())
        marks, token = rules.with_tangents(operation)(*operands)
        if operation.made:  # the call has already run: its reference is known
            return RRef.of(operation.made.pop(), with_marks(marks))
        return staged_reference(operation.to, operation.results, with_marks(marks), token)

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        operands, structure = operands_of(rref)
        key: Any = rref.claim.key
        results = Results() if rref.token is None else key.results
        if isinstance(rref.claim, StandIn):
            results.learn((rref.claim.layout, rref.claim.shapes))
        token = as_token(rref.id) if rref.token is None else None
        operation = Fetch(rref.owner.rank, structure, results, timeout)
        return results.rebuild(rules.fetch(operation, token)(*operands))

    def own(self, value: Any) -> RRef[Any]:
        worker = current_worker()
        layout, operands = split(value, is_array)
        claim = worker.references.claim_new(worker.rank)
        rule = rules.publish(Publish(layout, claim.id), worker.rank, as_token(claim.id))
        (marks,) = rule(*operands)
        claim.add(WHOLE)
        return RRef.of(claim, with_marks(marks))


def _to_trace(to: Any, function: Any, args: Args, kwargs: Kwargs) -> tuple[tuple[int, Any, Layout, Results], list[Any]]:
    """Return what makes a call with plain arrays, and its operands.

    NumPy arrays of a staged call stay as they are now, as constants of JAX do.
    """
    peer, staged = current_worker().directory.find(to), traced_hook.staging()
    if staged:
        args, kwargs = trees.steady((args, kwargs))
    function, args, kwargs = plain(function, args, kwargs, arrays=staged and not is_pure(function))
    arguments, operands = split((args, kwargs))
    return (peer.rank, function, arguments, Results()), operands


def install() -> None:
    traced_hook.install(TracedCalls())
