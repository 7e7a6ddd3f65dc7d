"""The public functions that call other workers."""

import collections
import contextlib
import functools
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Never, TypeVar, overload

from jdistgrad.errors import WorkerLostError
from jdistgrad.rpc import rref
from jdistgrad.rpc.caller import AnyWorker
from jdistgrad.rpc.claims import emptied
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.futures import CallFuture, CallFutures
from jdistgrad.rpc.mailbox import current_mailbox
from jdistgrad.rpc.peers import Peers
from jdistgrad.rpc.rref import RRef, handler_of_call
from jdistgrad.rpc.scopes import Scope
from jdistgrad.rpc.traced_hook import refuse_traced
from jdistgrad.wire.interrupts import wait_in_slices

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


def map(
    fn: Callable[..., T],
    *iterables: Iterable[Any],
    workers: Iterable[AnyWorker] | None = None,
    in_order: bool = True,
    return_exceptions: bool = False,
    progress: bool | str = False,
    timeout: float | None = None,
) -> Iterator[T]:
    """Call a function on each item, like the built-in ``map``; each call goes to a worker that is free.

    The calls start at once and go on while the results are used. A worker gets its next call when the one before has
    been answered, or has timed out. All items are read at once and are not copied: a NumPy array among them must not
    change until its result is there, so a generator must not fill one buffer again and again.

    Arguments:
      fn: a function as for ``rpc_sync``, of as many arguments as there are iterables.
      iterables: the items. The shortest iterable ends the map.
      workers: the workers that take part; defaults to all others that are not lost, or to this worker if it is alone.
      in_order: whether results come in the order of the items, or else in the order in which they are ready.
      return_exceptions: whether an exception stands in the place of its result, or else ends the iteration.
      progress: whether to show a progress bar, or the bar's text.
      timeout: seconds for each call, as in ``rpc_sync``.

    Returns:
      An iterator over the results. When the iteration ends early, no further calls start.

    Raises:
      Exception: ``fn`` raised it for this item.
      WorkerLostError: the worker that had this item was lost. The other workers go on with the other items.

    Example:
      >>> with jd.local_workers(3):
      ...     print([int(square) for square in jd.map(jnp.square, range(5))])
      [0, 1, 4, 9, 16]
    """
    tasks = list(zip(*iterables, strict=False))
    if handler_of_call(fn, (tasks,), {}) is not None:
        raise refuse_traced(f"jdistgrad.map cannot call {describe(fn)}")
    here = current_mailbox()
    if workers is None:
        left_out = {here.rank, *here.part(Peers).lost}
        chosen = [one for one in here.directory.workers if one.rank not in left_out] or [here.info]
    else:
        chosen = here.directory.find_all(workers)
    if not chosen:
        raise ValueError("map: there must be at least one worker")
    feed = Feed(lambda worker, task: rpc_sync(worker, fn, task, timeout=timeout), tasks, chosen)
    scope = current_scope()
    for worker in chosen:
        here.run(functools.partial(feed.keep_busy, worker, scope))
    found = feed.results(in_order=in_order, return_exceptions=return_exceptions)
    if progress is False:
        return found
    from rich.console import Console
    from rich.progress import track

    text = describe(fn) if progress is True else progress
    return iter(track(found, text, total=len(tasks), console=Console(stderr=True)))


class Feed:
    """The tasks of one map. A thread for each worker keeps it busy: a worker that has answered gets the next task.

    Arguments:
      call: calls the function on a worker, with the arguments of a task.
      tasks: the arguments of each call.
      workers: those that are not lost.
    """

    def __init__(self, call: Callable[[WorkerInfo, Any], Any], tasks: Sequence[Any], workers: Iterable[WorkerInfo]):
        self._call, self._tasks, self._workers = call, tasks, set(workers)
        self._ended: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._left = collections.deque(range(len(tasks)))

    def keep_busy(self, worker: WorkerInfo, scope: Scope | None) -> None:
        """Let a worker do tasks until all have been taken. A worker that is lost takes no more."""
        with within(scope):
            for number in emptied(self._left):
                try:
                    result, error = self._call(worker, self._tasks[number]), None
                except BaseException as raised:
                    result, error = None, raised
                self._ended.put((number, result, error))
                if isinstance(error, WorkerLostError) and error.worker == worker:
                    self._workers.discard(worker)
                    if not self._workers:  # with the last worker, all tasks that are left fail
                        for left in emptied(self._left):
                            self._ended.put((left, None, error))
                    return

    def results(self, *, in_order: bool, return_exceptions: bool) -> Iterator[Any]:
        early: dict[int, tuple[Any, BaseException | None]] = {}

        def wait(seconds: float | None) -> bool:
            with contextlib.suppress(queue.Empty):
                number, *outcome = self._ended.get(timeout=seconds)
                early[number if in_order else turn] = (*outcome,)
            return turn in early

        try:
            for turn in range(len(self._tasks)):
                while turn not in early:
                    wait_in_slices(wait)
                result, error = early.pop(turn)
                if error is not None and not return_exceptions:
                    raise error
                yield result if error is None else error
        finally:
            self._left.clear()
