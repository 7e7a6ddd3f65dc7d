"""Calls on other workers: what users write."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdistgrad.rpc.calls.caller import Target
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.references import rref
from jdistgrad.rpc.references.rref import RRef


def rpc_sync(
    to: Target,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """Call a function on another worker and wait for its result.

    Arguments:
      to: the worker: its name, its rank or its ``WorkerInfo``. It may be this one.
      fn: a function both sides can import, or have registered (``register``).
      args: its arguments: any pytree of arrays, Python objects, functions, references. RRefs arrive as their values.
      kwargs: its keyword arguments.
      timeout: seconds to wait (``math.inf``: no limit); default the world's.

    Returns:
      What ``fn`` returned. A ``concurrent.futures.Future`` that it returned is waited for there.

    Raises:
      Exception: what ``fn`` raised, in its own type, with the remote traceback in its notes.
      CallTimeoutError: no answer in time.
      UnknownWorkerError, FunctionError, EncodingError: nothing was sent; the message says why.

    Example:
      >>> jd.rpc_sync("worker1", jnp.add, args=(x, 1))
    """
    return rref.rpc_sync(to, fn, checked(fn, args), dict(kwargs or {}), timeout)


def rpc_async(
    to: Target,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> CallFuture:
    """Call a function on another worker; do not wait. See ``rpc_sync``.

    Returns:
      A ``concurrent.futures.Future`` of the result. Cancelling it stops the waiting, not the call.

    Example:
      >>> futures = [jd.rpc_async(peer, work, args=(k,)) for k, peer in enumerate(peers)]
      >>> results = [future.result() for future in futures]
    """
    return rref.rpc_async(to, fn, checked(fn, args), dict(kwargs or {}), timeout)


def remote(
    to: Target,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> RRef:
    """Call a function on another worker and leave the result there. See ``rpc_sync``.

    Returns:
      A reference to the result, at once. If ``fn`` raises, whoever needs the value first gets the exception.
      ``timeout`` is that of the reference's ``creation()``.

    Example:
      >>> params = jd.remote("worker1", init_params, args=(seed,))
    """
    return rref.remote(to, fn, checked(fn, args), dict(kwargs or {}), timeout)


def checked(fn: Callable[..., Any], args: Any) -> tuple[Any, ...]:
    """Arguments, if they are a tuple or a list of them."""
    if isinstance(args, tuple | list):
        return tuple(args)
    raise TypeError(
        f"args of the call of {describe(fn)} must be a tuple of its arguments, not a {type(args).__name__}. Of one "
        "argument: args=(x,)."
    )
