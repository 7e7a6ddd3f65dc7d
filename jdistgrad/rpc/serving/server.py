"""The callee's side of a call: open it, fetch referenced arguments, run the function, answer."""

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.calls.events import call_served
from jdistgrad.rpc.current import within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import ServedFunction, describe
from jdistgrad.rpc.futures import refuse_coroutine
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.rpc.serving.arguments import delivered
from jdistgrad.rpc.serving.being_served import BeingServed
from jdistgrad.rpc.serving.failures import Failure, add_note, pack, spelled
from jdistgrad.wire.message import Kind, Message
from jdistgrad.wire.transport import Task

OF_REFERENCES = "owner", "to_here", "local_value", "is_owner", "rpc_sync", "rpc_async", "remote"
BY_VALUE = (
    "References arrive as their values. A function that is to get a reference itself is called with "
    "jd.by_reference(reference)."
)

log = logging.getLogger("jdistgrad.rpc")


class Server:
    """The part of a worker that serves calls."""

    def __init__(self, mailbox: Mailbox, scopes: ScopeTable):
        self.mailbox, self.scopes = mailbox, scopes
        self.being_served = BeingServed()

    def task(self, message: Message, value: concurrent.futures.Future[Any] | None) -> Task:
        """Return the task that serves a call, for a thread that may wait.

        Arguments:
          value: the promise to complete if the call makes a referenced value (REMOTE).
        """
        return Served(self, message, value).serve


@dataclasses.dataclass(slots=True)
class Served:
    """A call being served.

    Attributes:
      context: the id of the scope it was made in, or None.
      thread: the thread that runs the function; 0 once the function has returned a future.
    """

    server: Server
    message: Message
    value: concurrent.futures.Future[Any] | None
    function: Any = None
    since: float = 0.0
    context: int | None = None
    thread: int = 0

    def serve(self) -> None:
        """Run the call and answer it. If the function returns a future, its callback answers, without a waiting thread.

        Code of users' classes runs in nearly every step (truth value, text, pickling), and may raise anything. Whatever
        it does, the caller gets an answer and the call counts as served, because shutdown waits for that. The call
        counts only when nothing here refers to its values any more: references among them have then been dropped, and
        shutdown waits for the messages that this sends.
        """
        self.since, self.thread = time.monotonic(), threading.get_ident()
        self.server.being_served.enter(self)
        self._finish(self._called)

    def _finish(self, compute: Callable[[], Any]) -> None:
        """Answer with the computed result. If it is a future, its callback comes here again when it is done."""
        try:
            result, error = compute(), None
            if isinstance(result, concurrent.futures.Future):
                self.thread = 0
                result.add_done_callback(lambda future: self._finish(lambda: _result_of(future)))
                return
            refuse_coroutine(result)
        except BaseException as raised:
            result, error = None, raised
        self._end(result, error)
        del result, error
        self.server.being_served.leave(self)
        self.server.mailbox.work.served(self.message.source)

    def _called(self) -> Any:
        """Call the function and return its result."""
        mailbox, scopes = self.server.mailbox, self.server.scopes
        function, args, kwargs, *scope = mailbox.open(self.message)
        self.message.body, self.function = None, function
        self.context = scope[0] if scope else None
        try:
            with within(scopes.enter(scope[0], self.message.source) if scope else None):
                if not (isinstance(function, ServedFunction) and function.takes_references):
                    args, kwargs = delivered(args, kwargs)
                mailbox.wait_for_arguments((args, kwargs))
                result = function(*args, **kwargs)
                mailbox.finish_programs(result)
                return result
        except BaseException as error:
            if isinstance(function, ServedFunction):
                function.failed(error)
            if isinstance(error, AttributeError) and error.name in OF_REFERENCES:
                add_note(error, BY_VALUE)
            raise

    def __str__(self) -> str:
        return "a call that could not be read" if self.function is None else describe(self.function)

    def _end(self, result: Any, error: BaseException | None) -> None:
        """Answer, and report the event. Raises nothing."""
        try:
            failure = None if error is None else self._failure(error)
            if self.value is not None:
                self.value.set_result(result) if failure is None else self.value.set_exception(failure.to_raise())
                result = None
            self._answer(result, failure)
            worker = self.server.mailbox.info
            call_served(self.message.id, self.function, worker, self.since, failed=failure is not None)
        except errors.WorkerLostError as gone:
            log.debug("%s: nobody waits for the answer to %s any more: %s", self.server.mailbox.info, self, gone)
        except BaseException as unsent:
            log.warning("%s: the answer to %s was lost: %s", self.server.mailbox.info, self, spelled(unsent))
        finally:
            self.function = None  # the object of a method may hold references

    def _answer(self, result: Any, failure: Failure | None) -> None:
        if failure is None:
            try:
                self._post(Kind.RESULT, result)
                return
            except errors.WorkerLostError as lost:
                if lost.worker in (self.message.source, self._caller()):
                    raise
                failure = self._failure(lost)  # the result needs another worker, for its class pickles it so
            except BaseException as unsendable:  # whatever the reason, the caller must get an answer
                worker = self.server.mailbox.info
                text = f"{worker} cannot send the result of {self} to {self._caller()}: {spelled(unsendable)}"
                failure = self._failure(errors.EncodingError(text))
        try:
            self._post(Kind.FAILURE, failure)
        except BaseException:
            self._post(Kind.FAILURE, dataclasses.replace(failure, error=None))  # only its texts

    def _failure(self, error: BaseException) -> Failure:
        return pack(error, f"On {self.server.mailbox.info}, in {self}, called by {self._caller()}:")

    def _caller(self) -> WorkerInfo:
        return self.server.mailbox.directory.workers[self.message.source]

    def _post(self, kind: Kind, body: Any) -> None:
        self.server.mailbox.post(self.message.source, Message(kind, self.server.mailbox.rank, self.message.id, body))


def _result_of(future: concurrent.futures.Future[Any]) -> Any:
    """Return a future's result, or raise its exception: ``result`` asks a user's exception for its truth value."""
    error = future.exception()
    if error is not None:
        raise error
    return future.result()
