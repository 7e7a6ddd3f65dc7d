"""The future of a call. The thread that asks for the answer opens it, not the thread that moves messages."""

import concurrent.futures
import threading
import time
import types
from collections.abc import Callable
from typing import Any, ClassVar, Never, TypeVar, cast

from jdistgrad.corrections import Corrected, Later
from jdistgrad.errors import FunctionError
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.wire.interrupts import InterruptibleFuture
from jdistgrad.wire.transport import Transport

T = TypeVar("T")
U = TypeVar("U")

Outcome = tuple[Any, BaseException | None]  # the result of a call, or else its error

IS_ASYNC = (
    "is an async function, whose coroutine would not be awaited on the called worker. Call a function that runs it: "
    "asyncio.run(...)."
)


class CallFuture(Corrected, Later, InterruptibleFuture[T]):
    """A ``concurrent.futures.Future`` whose result may still have to be unpacked.

    Unpacking can import modules and copy arrays, and callbacks run users' code: the transport's thread must do
    neither. So an answer is stored as it came, and ``result`` opens it. If the future has callbacks, a serving thread
    completes it.
    """

    corrections: ClassVar = dict.fromkeys(("wait", "value", "get", "to_here"), "result() waits and returns the value")

    def __init__(self, transport: Transport | None):
        super().__init__()
        self._transport = transport  # None: it is done as soon as it is made
        self._open: Callable[[], Outcome] | None = None  # of an answer that nobody has read
        self._opening = threading.Lock()
        self._has_callbacks = False

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        with self._opening:
            self._has_callbacks = True
        if self.done():
            self._read()
        super().add_done_callback(fn)

    def answer(self, opener: Callable[[], Outcome], run_elsewhere: Callable[[Callable[[], Any]], None]) -> None:
        """Complete the future. ``opener`` returns the outcome, or raises if it cannot be opened.

        Arguments:
          run_elsewhere: starts a task on a thread.
        """
        if not super().set_running_or_notify_cancel():
            return
        with self._opening:
            self._open = opener
            if not self._has_callbacks:
                super().set_result(cast("T", None))  # until somebody asks for the result
                return
        run_elsewhere(self._complete)

    def _complete(self) -> None:
        """Complete the future with what its callbacks read, which may be code of others."""
        self._read()
        if self._exception is None:
            super().set_result(cast("T", self._result))
        else:
            super().set_exception(self._exception)
        if self._transport is not None:
            self._transport.wake()

    def _compute(self, compute: Callable[[], T]) -> None:
        """Complete the future with a result that is computed now, or the exception that this raises."""
        outcome: Outcome
        try:
            outcome = compute(), None
        except BaseException as error:
            outcome = None, error
        self.answer(lambda: outcome, lambda task: task())

    def _read(self) -> None:
        with self._opening:
            if self._open is not None:
                try:
                    self._result, self._exception = self._open()
                except BaseException as error:
                    self._exception = error.with_traceback(None)  # which would refer to this future
                self._open = None

    def _refuse(self, *_: Any) -> Never:
        raise TypeError("only the answer to its call completes a CallFuture; cancel() ends the wait for it")

    set_result: Any = _refuse
    set_exception: Any = _refuse
    set_running_or_notify_cancel: Any = _refuse

    def result(self, timeout: float | None = None) -> T:
        error = self.exception(timeout)  # the base class would ask a user's exception for its truth value
        if error is None:
            return cast("T", self._result)
        try:
            raise error
        finally:
            del error, self  # the traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            start = time.monotonic()
            if self._transport is not None:
                self._transport.wait_for((self,), timeout)
            super().exception(None if timeout is None else max(0.0, timeout - (time.monotonic() - start)))
        elif self.cancelled():
            raise concurrent.futures.CancelledError
        self._read()
        return self._exception

    def then(self, fn: Callable[[T], U]) -> "CallFuture[U]":
        """Return a future of ``fn`` applied to the result. If the call failed, ``fn`` is not called.

        ``fn`` runs on a thread of this worker as soon as the result is there, or at once if it is there already. Calls
        that it makes belong to the context in which ``then`` was called. ``shutdown`` waits for ``fn``.
        """
        after: CallFuture[U] = CallFuture(self._transport)
        scope = current_scope()

        def run(future: concurrent.futures.Future[T]) -> None:
            def result() -> U:
                with within(scope):
                    return fn(future.result())

            after._compute(result)
            if after._transport is not None:
                after._transport.wake()

        self.add_done_callback(run)
        return after

    def __reduce__(self) -> Any:
        raise TypeError(
            "a future cannot be sent to another worker: return it from the remote function (the answer then goes out "
            "when it is done), or send its result()"
        )


class CallFutures(tuple[CallFuture[T], ...]):
    """The futures of one call on several workers, in the order of the workers."""

    def result(self) -> list[T]:
        """Wait for all, and return their results.

        Raises:
          ExceptionGroup: some calls failed; it holds their exceptions, whose notes name the workers.
        """
        results, errors, futures = list[T](), list[Exception](), list(self)
        try:
            while futures:
                try:
                    results.append(futures.pop(0).result())
                except Exception as error:
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(self)} calls failed", errors)
            return results
        finally:
            del errors, futures, self  # the tracebacks refer to this frame


def done_future(compute: Callable[[], T]) -> CallFuture[T]:
    """Return a future of a result that is computed now, or of the exception that this raises."""
    future: CallFuture[T] = CallFuture(None)
    future._compute(compute)
    return future


def answer_of(result: Any) -> Any:
    """Return what a function answers by its result: if that is a future, the future's result, once it has one."""
    while isinstance(result, concurrent.futures.Future):
        result = result.result()
    refuse_coroutine(result)
    return result


def refuse_coroutine(result: Any) -> None:
    """Raise FunctionError for what an async function returns: a method, a partial or an object may be one, too."""
    if isinstance(result, types.CoroutineType):
        result.close()  # Python would warn that nobody has awaited it
        raise FunctionError(f"{result.__qualname__} {IS_ASYNC}")
