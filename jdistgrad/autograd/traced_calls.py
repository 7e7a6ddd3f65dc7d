"""Calls with traced arguments: ``rpc_sync`` and the other calls inside grad, vmap and jit."""

import functools
from typing import Any

from jdistgrad.autograd.callee.functions import is_pure
from jdistgrad.autograd.operations import rules
from jdistgrad.autograd.operations.calls import Call, where
from jdistgrad.autograd.operations.owned_values import Fetch, Publish
from jdistgrad.autograd.operations.remote_calls import CallRemote
from jdistgrad.autograd.values.holes import Layout, Results, is_array, operands_of, split
from jdistgrad.autograd.values.typed import plain
from jdistgrad.rpc import traced_hook, trees
from jdistgrad.rpc.claims import StandIn
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.futures import done_future
from jdistgrad.rpc.handles import with_marks
from jdistgrad.rpc.owned import WHOLE
from jdistgrad.rpc.rref import RRef, staged_reference
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import as_token


class TracedCalls:
    def rpc_sync(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        call, operands = _to_trace(to, function, args, kwargs)
        operation = Call(*call, timeout, where=where())
        return operation.results.rebuild(rules.with_tangents(operation)(*operands))

    def rpc_async(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        """Make the call at once and return a future that is done. The staged step sends calls out together."""
        return done_future(functools.partial(self.rpc_sync, to, function, args, kwargs, timeout))

    def remote(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> RRef[Any]:
        call, operands = _to_trace(to, function, args, kwargs)
        operation = CallRemote(*call, timeout, where=where(), staged=traced_hook.staging())
        marks, token = rules.with_tangents(operation)(*operands)
        if operation.made:  # the call has already run: its reference is known
            return RRef._of(operation.made.pop(), with_marks(marks))
        return staged_reference(operation.to, operation.results, with_marks(marks), token)

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        operands, structure = operands_of(rref)
        key: Any = rref._claim.key
        results = Results() if rref.token is None else key.results
        if isinstance(rref._claim, StandIn):
            results.learn((rref._claim.layout, rref._claim.shapes))
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
        return RRef._of(claim, with_marks(marks))


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
