"""The caller's side of a call: check it, send it, and ensure that it is answered, expires or fails."""

import functools
import inspect
import math
import numbers
import threading
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

from jdistgrad import errors, events
from jdistgrad._compat import trace_state_clean
from jdistgrad.config import settings
from jdistgrad.leaves import check_kept_elsewhere
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import Args, Kwargs, describe
from jdistgrad.rpc.futures import IS_ASYNC, CallFuture, Outcome
from jdistgrad.rpc.mailbox import CALL, CALLBACKS, Mailbox, WorkerPart
from jdistgrad.rpc.pending import Pending, PendingCalls, call_ended
from jdistgrad.rpc.traced_hook import is_traced, refuse_traced
from jdistgrad.wire.interrupts import put_off_interrupt, wait_for_first
from jdistgrad.wire.message import Message, MessageType, spell

AnyWorker = str | int | WorkerInfo
Invocation = tuple[Callable[..., Any], Args, Kwargs]

CANNOT_BE_SENT = errors.EncodingError, errors.FunctionError, errors.WireError


class Caller(WorkerPart):
    """The part of a worker that makes calls.

    Arguments:
      check: raises if a call cannot be made: the world is closed or broken, or the other worker is lost.
    """

    def __init__(self, mailbox: Mailbox, check: Callable[[Pending], None]):
        self._mailbox, self._check = mailbox, check
        self.pending = PendingCalls()

    def rpc_sync(self, to: AnyWorker, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Any:
        """Call, and look for the answer on this thread: no future is made."""
        mailbox, call = self._mailbox, (function, args, kwargs)
        pending = self._pending(next(mailbox.ids), mailbox.directory.find(to), call, timeout, None)
        with put_off_interrupt():
            self._send(MessageType.CALL, pending, call, snapshot=False)
            mailbox.transport.wait(pending)
        while not pending.done:  # Ctrl-C has ended the wait, and its handler has raised nothing, or is put off
            wait_for_first(pending.futures(), mailbox.timeout)
        result, error = pending.outcome()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error, pending  # the traceback refers to this frame

    def rpc_async(
        self, to: AnyWorker, function: Any, args: Args, kwargs: Kwargs, timeout: float | None
    ) -> CallFuture[Any]:
        call = function, args, kwargs
        return self.start(MessageType.CALL, next(self._mailbox.ids), to, call, timeout)

    def start(
        self, kind: MessageType, identifier: int, to: AnyWorker, call: Invocation, timeout: float | None
    ) -> CallFuture[Any]:
        mailbox = self._mailbox
        future = CallFuture[Any](mailbox.transport)
        pending = self._pending(identifier, mailbox.directory.find(to), call, timeout, future)
        with put_off_interrupt():
            self._send(kind, pending, call, snapshot=True)
        return future

    def start_all(self, to: Iterable[AnyWorker], call: Invocation, timeout: float | None) -> list[CallFuture[Any]]:
        """Send a call to several workers, encoded once; return the futures. A call that cannot be sent fails by itself.

        Raises if no worker can be sent this call, before anything is sent.
        """
        mailbox, peers = self._mailbox, self._mailbox.directory.find_all(to)
        futures = [CallFuture[Any](mailbox.transport) for _ in peers]
        calls = [
            self._pending(next(mailbox.ids), peer, call, timeout, future)
            for peer, future in zip(peers, futures, strict=True)
        ]
        if not calls:
            return []
        try:
            body = mailbox.for_several(call)
        except CANNOT_BE_SENT as error:
            rest = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
            raise type(error)(f"cannot call {calls[0]}{rest}: {error}") from error
        for pending in calls:
            try:
                with put_off_interrupt():
                    self._send(MessageType.CALL, pending, body, snapshot=True)
            except Exception as error:
                self._fail(pending, error)
        return futures

    def make_room(self) -> None:
        """Wait while the calls that are not answered yet have more bytes of arguments than the settings allow.

        A thread that serves a call does not wait: the calls that it would wait for may wait for its own.
        """
        while self.pending.bytes > settings.in_flight_bytes:
            if any(one.what is CALL for one in self._mailbox.running_here()):
                return
            leaving = self.pending.leaving(settings.in_flight_bytes)
            if leaving is not None:  # else there is room by now
                self._mailbox.transport.wait_for((leaving,), None)
                leaving.result()

    def _pending(
        self, identifier: int, peer: WorkerInfo, call: Invocation, timeout: float | None, future: Any
    ) -> Pending:
        """Check a call, and return its entry for the table. The encoder checks arguments that are not handed over."""
        mailbox, (function, *arguments) = self._mailbox, call
        if not callable(function):
            raise errors.FunctionError(
                f"a call needs a function, not {function!r:.60}. Pass the function and its arguments, not its result: "
                f"rpc_sync({peer.name!r}, function, args=(...))"
            )
        if isinstance(function, types.FunctionType) and function.__code__.co_flags & inspect.CO_COROUTINE:
            raise errors.FunctionError(f"{describe(function)} {IS_ASYNC}")
        if mailbox.hands_over or peer is mailbox.info:
            if not trace_state_clean() and any(map(is_traced, trees.leaves(arguments))):
                raise refuse_traced(f"cannot call {describe(function)} on {peer}")
            check_kept_elsewhere(trees.leaves(arguments))
        seconds = mailbox.timeout if timeout is None else checked_timeout(timeout)
        now = time.monotonic()
        origin = current_scope(), threading.get_ident()
        return Pending(identifier, peer, mailbox.info, function, seconds, now + seconds, future, now, *origin)

    def _send(self, kind: MessageType, pending: Pending, body: Any, *, snapshot: bool) -> None:
        """Send a call; if it was made in a scope, the scope then includes the peer."""
        mailbox, peer, scope = self._mailbox, pending.peer.rank, pending.scope
        message = Message(kind, mailbox.rank, pending.id, body)
        try:
            if scope is not None:
                message.scope = scope.id
                scope.includes(peer)
            self.pending.open(pending)
            self._check(pending)  # now: a later close, or loss of a peer, finds this call in the table
            parcel = mailbox.post(peer, message, snapshot=snapshot)
            if parcel is not None and pending.future is not None:
                self.pending.sent(pending, parcel.bytes)
        except BaseException as error:
            self.pending.close(pending.id)
            if isinstance(error, CANNOT_BE_SENT):
                raise type(error)(f"cannot call {pending}: {error}") from error
            if isinstance(error, errors.WorkerLostError) and error.worker == peer:  # transports know no names
                raise errors.WorkerLostError(f"{pending}: {error}", worker=pending.peer) from error
            raise

    def answered(self, message: Message) -> None:
        """Complete a call by its RESULT or FAILURE. The thread that waits for the answer opens it, not this one."""
        pending = self.pending.close(message.id)
        if pending is None:
            why = f"nobody waits for the answer to call {spell(message.id)}"
            self._mailbox.refuse(message.source, f"a {message.kind.name}", why)
        else:
            if events.sink is not None:
                call_ended(pending, failed=message.kind is MessageType.FAILURE)
            opener = functools.partial(self._outcome, message)
            if pending.future is None:
                pending.outcome = opener
                pending.end()
            else:
                self._complete(pending, opener)

    def _outcome(self, message: Message) -> Outcome:
        body = self._mailbox.open(message)
        return (None, body.to_raise()) if message.kind is MessageType.FAILURE else (body, None)

    @property
    def busy(self) -> bool:
        return len(self.pending) > 0

    def awaited(self) -> set[int]:
        return self.pending.peers()

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        self.fail_all(lambda call: errors.WorkerLostError(f"{call}: {why}", worker=peer), peer.rank)

    def tick(self, now: float) -> None:
        """Fail the calls that have not been answered in time."""
        if now < self.pending.first_deadline:
            return
        with self._mailbox.work.under_way():  # from a call's end to its callbacks
            for pending in self.pending.expire(now):
                text = (
                    f"{pending}, was not answered within {pending.timeout:g} s. Give the call (timeout=) or the world "
                    f"(init(timeout=)) more time if it may take that long."
                )
                self._fail(pending, errors.CallTimeoutError(text, worker=pending.peer, seconds=pending.timeout))

    def fail_all(self, make_error: Callable[[Pending], BaseException], peer: int | None = None) -> None:
        with self._mailbox.work.under_way():
            for pending in self.pending.close_all(peer):
                self._fail(pending, make_error(pending))

    def _fail(self, pending: Pending, error: BaseException) -> None:
        call_ended(pending, failed=True)
        self._complete(pending, lambda: (None, error))

    def _complete(self, pending: Pending, opener: Callable[[], Outcome]) -> None:
        if pending.future is None:
            pending.outcome = opener
            pending.end()
        else:
            run = functools.partial(self._mailbox.run_callbacks, CALLBACKS, pending.function, pending.peer.rank)
            pending.future.answer(opener, run)


def checked_timeout(seconds: Any) -> float:
    """Return a timeout that a caller gave. Raises ValueError if it is not a positive number."""
    if isinstance(seconds, numbers.Real) and not isinstance(seconds, bool) and (limit := cast("float", seconds)) > 0:
        return float(limit) if limit < threading.TIMEOUT_MAX else math.inf
    raise ValueError(f"timeout must be a positive number of seconds (math.inf: no limit), not {seconds!r}")
