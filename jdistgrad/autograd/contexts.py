"""Contexts, which collect gradients on every worker that a computation reaches, until their block ends."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.callee.contributions import gradient_tree
from jdistgrad.autograd.graph import Graph, gather
from jdistgrad.autograd.tape.tape import Lease, Tape, leased_context
from jdistgrad.autograd.values.primitive import settle
from jdistgrad.corrections import Corrected
from jdistgrad.errors import ContextError, DifferentiationError, EncodingError
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.scopes import Scope, closed_error
from jdistgrad.rpc.worker import Worker, current_worker, find_worker
from jdistgrad.wire.message import spell

F = TypeVar("F", bound=Callable[..., Any])


class Context(Corrected):
    """The gradients and recorded pullbacks of one computation; ``with jdistgrad.context() as ctx`` opens one.

    Attributes:
      id: the 64-bit id: the rank of the worker that opened the context in the top 16 bits.
    """

    corrections: ClassVar = dict.fromkeys(("gradients", "grads", "get_gradients"), "jd.get_gradients(ctx) returns them")

    def __init__(self, worker: Worker, scope: Scope):
        self._worker, self.scope, self.id = worker, scope, scope.id

    @property
    def closed(self) -> bool:
        return self.scope.closed

    @property
    def tape(self) -> Tape:
        """Return this worker's tape of the context. Raises ContextError once the context is closed."""
        return self.scope.content(Tape)

    def workers(self) -> set[int]:
        """Return the ranks of the workers that this worker has called in the context."""
        return self.scope.peers()

    def graph(self) -> Graph:
        """Gather the graph recorded so far on every worker the context has reached: see ``Graph``.

        Raises:
          ContextError: the context is closed, or not known here.
        """
        return gather(self._worker.scopes.find(self.id))

    def _repr_svg_(self) -> str | None:
        return None if self.closed else self.graph()._repr_svg_()

    def close(self) -> None:
        """Release the context on every worker. The end of the block does this."""
        self._worker.releasing.close_scope(self.id)

    def __reduce__(self) -> Any:
        raise EncodingError(
            f"{self!r} belongs to this worker and cannot be sent. Send ctx.id, which get_gradients and optimizer.step "
            "also take; a function that is called in a context runs in this context on the other worker."
        )

    def __repr__(self) -> str:
        return f"Context({spell(self.id)}{', closed' if self.closed else ''})"


@contextlib.contextmanager
def context() -> Iterator[Context]:
    """Open a context, in which the gradients of references are added up. Derivatives of arrays need no context.

    Every worker that takes part creates its own part of the context on the first message that names the context, and
    releases that part when the block ends, normally or by an exception.

    Raises:
      ContextError: this thread is already in a context.

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
    with opened_context() as opened:
        yield opened
        settle()


@contextlib.contextmanager
def opened_context() -> Iterator[Context]:
    worker = current_worker()
    opened = Context(worker, worker.scopes.enter(next(worker.scopes.ids)))
    try:
        with within(opened.scope):
            yield opened
    finally:
        opened.close()


def find_context(which: Any) -> Context:
    """Return this worker's context for a ``Context`` object or an id."""
    worker = current_worker()
    if isinstance(which, Context) and which.closed:  # an earlier world's: another context may have its id now
        raise closed_error(which.id)
    if not isinstance(which, Context | int):
        raise TypeError(
            "expected a context, which `with jdistgrad.context() as ctx:` gives, or its id, not a "
            f"{type(which).__name__}: {which!r}"
        )
    return Context(worker, worker.scopes.find(which.id if isinstance(which, Context) else which))


def get_gradients(ctx: Context | int) -> dict[RRef[Any], Any]:
    """Return the gradients that a context holds on this worker, for values that this worker owns.

    Arguments:
      ctx: the context, or its id (``ctx.id`` can be sent to another worker).

    Returns:
      For each reference that was differentiated, a pytree with the structure of its value, with None in place of leaves
      that are not float arrays.

    Raises:
      ContextError: the context is closed, or no call in it has reached this worker.
      DifferentiationError: JAX traces this code (grad, vmap, jit ...), to which the gradients would be constants.

    Example:
      >>> jd.on("worker1", jd.get_gradients)(ctx.id)  # of the values that worker1 owns
    """
    if not trace_state_clean():
        raise DifferentiationError(
            "get_gradients inside a function that JAX traces (grad, vmap, jax.jit, scan ...) would return constants, "
            "without a derivative. Call get_gradients outside; for derivatives of gradients, differentiate copies of "
            "the values, rref.to_here()."
        )
    found, references = dict[RRef[Any], Any](), current_worker().references
    for identifier, leaves in find_context(ctx).tape.gradients().items():
        claim = references.share(identifier)
        if claim is not None:
            found[RRef.of(claim)] = gradient_tree(identifier, leaves)
    return found


@contextlib.contextmanager
def some_context(*, needed: bool = True) -> Iterator[Any]:
    """Use this thread's context, or open one if calls may need a context; yield the new context's lease, or None."""
    if not needed or current_scope() is not None or find_worker() is None or not trace_state_clean():
        yield None
        return
    leases = list[Lease]()
    try:
        with leased_context(leases):
            yield leases[0]
            settle()
    except BaseException:  # its traceback would keep the lease alive
        leases[0].close()
        raise
