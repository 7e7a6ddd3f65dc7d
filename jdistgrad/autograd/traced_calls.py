"""Calls with traced arguments: ``rpc_sync`` and the other calls inside grad, vmap and jit."""

import functools
from typing import Any

from jdistgrad.autograd.callee.functions import is_pure
from jdistgrad.autograd.operations import rules
from jdistgrad.autograd.operations.calls import Call, where
from jdistgrad.autograd.operations.owned_values import Fetch, Publish
from jdistgrad.autograd.operations.remote_calls import CallRemote
from jdistgrad.autograd.values.holes import is_array, operands_of, split
from jdistgrad.autograd.values.results import Results
from jdistgrad.autograd.values.typed import plain
from jdistgrad.rpc import traced_hook, trees
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.futures import done_future
from jdistgrad.rpc.references.claims import WHOLE, StandIn
from jdistgrad.rpc.references.handles import with_marks
from jdistgrad.rpc.references.rref import RRef, staged_reference
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import as_token


class TracedCalls:
    """The ``TracedCallHandler`` to which rpc hands over traced calls."""

    def rpc_sync(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        peer, results = current_worker().directory.find(to), Results()
        function, args, kwargs = _to_trace(function, args, kwargs)
        arguments, operands = split((args, kwargs))
        operation = Call(peer.rank, function, arguments, results, timeout, where=where())
        return results.rebuild(rules.with_tangents(operation)(*operands))

    def rpc_async(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        """Make the call at once and return a future that is done. The staged step sends calls out together."""
        return done_future(functools.partial(self.rpc_sync, to, function, args, kwargs, timeout))

    def remote(self, to: Any, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> RRef[Any]:
        peer, results = current_worker().directory.find(to), Results()
        function, args, kwargs = _to_trace(function, args, kwargs)
        arguments, operands = split((args, kwargs))
        staged = traced_hook.staging()
        operation = CallRemote(peer.rank, function, arguments, results, timeout, where=where(), staged=staged)
        marks, token = rules.with_tangents(operation)(*operands)
        if operation.made:  # the call has already run: its reference is known
            return RRef._of(operation.made.pop(), with_marks(marks))
        return staged_reference(peer.rank, results, with_marks(marks), token)

    def fetch(self, rref: RRef[Any], timeout: float | None) -> Any:
        operands, structure = operands_of(rref)
        key: Any = rref._claim.key
        results = Results() if rref.token is None else key.results
        if isinstance(rref._claim, StandIn):
            results.learn((rref._claim.layout, rref._claim.shapes))
        token = as_token(rref.id) if rref.token is None else None
        operation = Fetch(structure, results, timeout)
        return results.rebuild(rules.fetch(operation, rref.owner.rank, token)(*operands))

    def own(self, value: Any) -> RRef[Any]:
        worker = current_worker()
        layout, operands = split(value, is_array)
        claim = worker.references.claim_new(worker.rank)
        rule = rules.publish(Publish(layout, claim.id), worker.rank, as_token(claim.id))
        (marks,) = rule(*operands)
        claim.add(WHOLE)
        return RRef._of(claim, with_marks(marks))


def _to_trace(function: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any, Any]:
    """Return a call with plain arrays. NumPy arrays of a staged one stay as they are now, as constants of JAX do."""
    staged = traced_hook.staging()
    if staged:
        args, kwargs = trees.steady((args, kwargs))
    return plain(function, args, kwargs, arrays=staged and not is_pure(function))


def install() -> None:
    traced_hook.install(TracedCalls())
