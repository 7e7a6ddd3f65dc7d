"""The public functions that call other workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Never, TypeVar, overload

from jdistgrad.rpc import rref
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.futures import CallFuture, CallFutures
from jdistgrad.rpc.mailbox import current_mailbox
from jdistgrad.rpc.rref import RRef

T = TypeVar("T")

# A function that returns a future is answered with the future's result: each function here has two types.
Function = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any] | None
Seconds = float | None
Workers = Iterable[AnyWorker] | None


@overload
def rpc_sync(
    to: AnyWorker, fn: Callable[..., Future[T]], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> T: ...


@overload
def rpc_sync(
    to: AnyWorker, fn: Callable[..., T], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> T: ...


def rpc_sync(
    to: AnyWorker, fn: Function, args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None, **others: Never
) -> Any:
    """Call a function on another worker and wait for its result.

    Arguments:
      to: the worker, by its name, its rank or its ``WorkerInfo``. It may be this worker.
      fn: a function that both sides can import or have registered (``register``).
      args: the arguments: any pytree of arrays, Python objects, functions, references. RRefs arrive as their values.
      kwargs: the keyword arguments.
      timeout: seconds to wait (``math.inf``: no limit); defaults to the world's timeout.

    Returns:
      The result of ``fn``. If ``fn`` returns a ``concurrent.futures.Future``, the result of that future.

    Raises:
      Exception: ``fn`` raised it; it has its own type, and the remote traceback in its notes.
      CallTimeoutError: no answer came in time.
      UnknownWorkerError, FunctionError, EncodingError: nothing was sent; the message says why.

    Example:
      >>> jd.rpc_sync("worker1", jnp.add, args=(x, 1))
    """
    return rref.rpc_sync(to, fn, checked(fn, args, others), dict(kwargs or {}), timeout)


@overload
def rpc_async(
    to: AnyWorker, fn: Callable[..., Future[T]], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> CallFuture[T]: ...


@overload
def rpc_async(
    to: AnyWorker, fn: Callable[..., T], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> CallFuture[T]: ...


def rpc_async(
    to: AnyWorker, fn: Function, args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None, **others: Never
) -> CallFuture[Any]:
    """Call a function on another worker without waiting. See ``rpc_sync``.

    Returns:
      A ``concurrent.futures.Future`` of the result. Cancelling the future ends the wait, not the call.

    Example:
      >>> futures = [jd.rpc_async(peer, work, args=(k,)) for k, peer in enumerate(peers)]
      >>> results = [future.result() for future in futures]
    """
    future: CallFuture[Any] = rref.rpc_async(to, fn, checked(fn, args, others), dict(kwargs or {}), timeout)
    return future


@overload
def rpc_all(
    workers: Workers, fn: Callable[..., Future[T]], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> CallFutures[T]: ...


@overload
def rpc_all(
    workers: Workers, fn: Callable[..., T], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> CallFutures[T]: ...


def rpc_all(
    workers: Workers, fn: Function, args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None, **others: Never
) -> CallFutures[Any]:
    """Call a function on several workers without waiting. See ``rpc_sync``. The arguments are encoded once.

    Arguments:
      workers: the workers; None for all workers of the world, this one among them.

    Returns:
      The futures of the results, in the order of the workers. Their ``result()`` returns a list, or raises an
      ``ExceptionGroup`` of the exceptions of all calls that failed.

    Example:
      >>> jd.rpc_all(["worker1", "worker2"], jnp.add, args=(1, 2)).result()
      [Array(3, dtype=int32, weak_type=True), Array(3, dtype=int32, weak_type=True)]
    """
    return CallFutures(rref.rpc_all(workers_of(workers), fn, checked(fn, args, others), dict(kwargs or {}), timeout))


def workers_of(workers: Workers) -> Iterable[AnyWorker]:
    """Return the workers that a call names; all workers of the world for None."""
    return current_mailbox().directory.workers if workers is None else workers


@overload
def remote(
    to: AnyWorker, fn: Callable[..., Future[T]], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> RRef[T]: ...


@overload
def remote(
    to: AnyWorker, fn: Callable[..., T], args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None
) -> RRef[T]: ...


def remote(
    to: AnyWorker, fn: Function, args: Args = (), kwargs: Kwargs = None, *, timeout: Seconds = None, **others: Never
) -> RRef[Any]:
    """Call a function on another worker and leave the result there. See ``rpc_sync``.

    Returns:
      A reference to the result, at once. If ``fn`` raises, code that needs the value gets the exception. ``timeout``
      applies to the reference's ``creation()``.

    Example:
      >>> params = jd.remote("worker1", init_params, args=(seed,))
    """
    return rref.remote(to, fn, checked(fn, args, others), dict(kwargs or {}), timeout)


def checked(fn: Callable[..., Any], args: Any, others: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments as a tuple. Raises TypeError if they are neither a tuple nor a list, or there are others."""
    if others:
        raise TypeError(
            f"a call takes args, kwargs and timeout, not {next(iter(others))!r}. Keyword arguments of {describe(fn)} "
            f"go in kwargs: kwargs={others!r:.60}"
        )
    if isinstance(args, tuple | list):
        return tuple(args)
    raise TypeError(
        f"args of the call of {describe(fn)} must be a tuple of its arguments, not {args!r:.60}. For one "
        "argument: args=(x,)."
    )
