"""Contexts: where gradients are gathered, on every worker a computation touches, until the block ends."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.graph.graph import Graph, gather
from jdistgrad.autograd.tape.contributions import gradient_tree
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.autograd.values.primitive import settle
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire.ids import spell


class Context:
    """One backward computation's gradients and records; what ``with jdistgrad.context() as ctx`` gives."""

    def __init__(self, worker: Worker, scope: Scope):
        self._worker, self._scope = worker, scope

    @property
    def id(self) -> int:
        """64 bits: the worker that opened it in the top 16."""
        return self._scope.id

    @property
    def closed(self) -> bool:
        return self._scope.closed

    @property
    def tape(self) -> Tape:
        """What this worker keeps for it. Raises ContextError once it is closed."""
        return self._scope.content(Tape)

    @property
    def scope(self) -> Scope:
        return self._scope

    def workers(self) -> set[int]:
        """The ranks of the workers that were called from here in it."""
        return self._scope.peers()

    def graph(self) -> Graph:
        """What has been recorded in it so far on every worker it reached, for a picture: see ``Graph``.

        Raises:
          ContextError: it is closed, or not known here.
        """
        return gather(self._worker.scopes.find(self.id))

    def _repr_svg_(self) -> str | None:
        return None if self.closed else self.graph()._repr_svg_()

    def close(self) -> None:
        """Let go of everything, on every worker. Done by the end of the block."""
        self._worker.releasing.close_scope(self.id)

    def __repr__(self) -> str:
        return f"Context({spell(self.id)}{', closed' if self.closed else ''})"


@contextlib.contextmanager
def context() -> Iterator[Context]:
    """Open a context: derivatives of remote calls in the block leave their gradients in it.

    Every worker that takes part makes its own part of it when the first message that names it comes, and lets it go
    when the block ends, normally or by an exception.

    Raises:
      ContextError: this thread is in a context already.

    Example:
      >>> with jd.context() as ctx:
      ...     loss, grads = jd.value_and_grad(loss_fn, argnums=(0, 1))(enc, head)
      ...     optimizer.step(ctx)
    """
    outer = current_scope()
    if outer is not None:
        raise ContextError(
            f"this thread is already in context {spell(outer.id)}: contexts are not nested. End that block first, or "
            "open the other one in a thread of its own.",
            context=outer.id,
        )
    opened = open_context()
    try:
        with within(opened.scope):
            yield opened
            settle()
    finally:
        opened.close()


def open_context() -> Context:
    """A context that nobody is in yet."""
    worker = current_worker()
    return Context(worker, worker.scopes.open())


def find_context(which: Any) -> Context:
    """The context an object or an id names, on this worker."""
    worker = current_worker()
    if isinstance(which, Context):
        return Context(worker, worker.scopes.find(which.id))
    if isinstance(which, int):
        return Context(worker, worker.scopes.find(which))
    raise TypeError(f"expected a context (or its id), not a {type(which).__name__}: {which!r}")


def get_gradients(ctx: Context | int) -> dict[RRef, Any]:
    """The gradients a context holds on this worker, of values this worker owns.

    Arguments:
      ctx: the context, or its id (as ``ctx.id`` was sent to another worker).

    Returns:
      A pytree for each reference that was differentiated, of the structure of its value; None where that holds no
      float array.

    Raises:
      ContextError: it is closed, or no call in it has come to this worker.

    Example:
      >>> jd.rpc_sync("worker1", lambda c: jd.get_gradients(c), args=(ctx.id,))
    """
    found, worker = find_context(ctx), current_worker()
    gradients = found.tape.gradients()
    claims = {identifier: worker.references.share(identifier) for identifier in gradients}
    return {
        RRef._of(claim): gradient_tree(identifier, gradients[identifier])
        for identifier, claim in claims.items()
        if claim is not None
    }


class Lease:
    """A context that ends when nobody needs its gradients any more."""

    def __init__(self, opened: Context):
        self._worker, self._id = current_worker(), opened.id

    def __del__(self) -> None:
        self._worker.releasing.abandon_scope(self._id)


@contextlib.contextmanager
def some_context(*, needed: bool = True) -> Iterator[Any]:
    """The context this thread is in; or one of its own, where calls may need it: gives what keeps that open."""
    if not needed or current_scope() is not None or find_worker() is None or not trace_state_clean():
        yield None
        return
    opened = open_context()
    lease = Lease(opened)
    try:
        with within(opened.scope):
            yield lease
            settle()
    except BaseException:  # whose traceback would keep the lease
        opened.close()
        raise
