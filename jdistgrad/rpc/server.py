"""The callee's side of a call: open it, fetch referenced arguments, run the function, answer."""

import concurrent.futures
import logging
import math
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from jdistgrad import errors, events
from jdistgrad.rpc import trees
from jdistgrad.rpc.claims import StandIn
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.failures import Failure, pack, spelled
from jdistgrad.rpc.functions import Args, Kwargs, ServedFunction
from jdistgrad.rpc.futures import refuse_coroutine
from jdistgrad.rpc.mailbox import Mailbox, Running
from jdistgrad.rpc.pending import call_served
from jdistgrad.rpc.rref import ByReference, RRef
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.wire.message import Message, MessageType

OF_REFERENCES = "owner", "to_here", "local_value", "is_owner", "rpc_sync", "rpc_async", "remote"
BY_VALUE = (
    "References arrive as their values. A function that is to get a reference itself is called with "
    "jd.by_reference(reference)."
)

log = logging.getLogger("jdistgrad.rpc")


class Served(Running):
    """A call being served, from its opening to its answer.

    Arguments:
      value: the promise to complete if the call makes a referenced value (REMOTE).
    """

    def __init__(
        self, mailbox: Mailbox, scopes: ScopeTable, message: Message, value: concurrent.futures.Future[Any] | None
    ):
        super().__init__(message.source)
        self._mailbox, self._scopes, self._message, self._value = mailbox, scopes, message, value

    def serve(self) -> None:
        """Run the call and answer it. If the function returns a future, its callback answers, without a waiting thread.

        Whatever users' code does, the caller gets an answer and the call counts as served, because shutdown waits for
        that. The call counts only when nothing here refers to its values any more: references among them have then
        been dropped, and shutdown waits for the messages that this sends.
        """
        self.since, self.thread = time.monotonic(), threading.get_ident()
        self._mailbox.running[id(self)] = self
        self._finish(self._called)

    def _finish(self, compute: Callable[[], Any]) -> None:
        """Answer with the computed result. If it is a future, its callback comes here again when it is done."""
        try:
            result, error = compute(), None
            if isinstance(result, concurrent.futures.Future):
                self.thread = 0
                result.add_done_callback(lambda future: self._finish(future.result))
                return
            if isinstance(result, types.CoroutineType):
                refuse_coroutine(result)
        except BaseException as raised:
            result, error = None, raised
        self._end(result, error)
        del result, error
        self._mailbox.running.pop(id(self), None)
        self._mailbox.work.served(self._message.source)

    def _called(self) -> Any:
        message = self._message
        function, args, *rest = self._mailbox.open(message)
        kwargs = rest[0] if rest else {}
        message.body, self.function = None, function
        try:
            if message.scope is None and current_scope() is None:
                return self._run(function, args, kwargs)
            with within(None if message.scope is None else self._scopes.enter(message.scope, message.source)):
                return self._run(function, args, kwargs)
        except BaseException as error:
            if isinstance(function, ServedFunction):
                function.failed(error)
            if isinstance(error, AttributeError) and error.name in OF_REFERENCES:
                error.add_note(BY_VALUE)
            raise

    def _run(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        evidently_values = not kwargs and trees.LEAVES.issuperset(map(type, args))
        if not (evidently_values or (isinstance(function, ServedFunction) and function.takes_references)):
            args, kwargs = delivered(args, kwargs)
        self._mailbox.wait_for_arguments((args, kwargs))
        result = function(*args, **kwargs)
        self._mailbox.finish_programs(result)
        return result

    def _end(self, result: Any, error: BaseException | None) -> None:
        """Answer, and report the event. Raises nothing."""
        worker = self._mailbox.info
        try:
            failure = None if error is None else self._failure(error)
            if self._value is not None:
                self._value.set_result(result) if failure is None else self._value.set_exception(failure.to_raise())
                result = None
            self._answer(result, failure)
            if events.sink is not None:
                call_served(self._message.id, self.function, worker, self.since, failed=failure is not None)
        except (errors.WorkerLostError, SystemExit) as gone:  # this one too, at the end of the program (threads.py)
            log.debug("%s: nobody waits for the answer to %s any more: %s", worker, self, gone)
        except BaseException as unsent:
            log.warning("%s: the answer to %s was lost: %s", worker, self, spelled(unsent))
        finally:
            self.function = None  # the object of a method may hold references

    def _answer(self, result: Any, failure: Failure | None) -> None:
        mailbox, source = self._mailbox, self._message.source
        if failure is None:
            try:
                mailbox.post(source, Message(MessageType.RESULT, mailbox.rank, self._message.id, result))
                return
            except errors.WorkerLostError as lost:
                if lost.worker in (source, mailbox.directory.workers[source]):
                    raise
                failure = self._failure(lost)  # the result needs another worker, for its class pickles it so
            except Exception as unsendable:  # whatever the reason, the caller must get an answer
                to = mailbox.directory.workers[source]
                text = f"{mailbox.info} cannot send the result of {self} to {to}: {spelled(unsendable)}"
                failure = self._failure(errors.EncodingError(text))
        mailbox.post(source, Message(MessageType.FAILURE, mailbox.rank, self._message.id, failure))

    def _failure(self, error: BaseException) -> Failure:
        mailbox = self._mailbox
        caller = mailbox.directory.workers[self._message.source]
        return pack(error, f"On {mailbox.info}, in {self}, called by {caller}:")


# References among the arguments of a call.


def delivered(args: Args, kwargs: Kwargs) -> Any:
    """Return the arguments for the called function: references replaced by their values, fetched all at once.

    There is no timeout here, because the call has one.
    """
    fetched: dict[RRef[Any], concurrent.futures.Future[Any]] = {}

    def start(leaf: Any) -> Any:
        if isinstance(leaf, RRef) and leaf not in fetched:
            fetched[leaf] = leaf.value_future(math.inf)
        return leaf

    return with_values(trees.map_leaves(start, (args, kwargs)), lambda rref: fetched[rref].result())


def with_values(tree: Any, value_of: Callable[[RRef[Any]], Any]) -> Any:
    """Replace the references in a tree by their values, and references that were passed as such by themselves."""

    def deliver(leaf: Any) -> Any:
        if isinstance(leaf, RRef):
            return value_of(leaf)
        return leaf.rref if isinstance(leaf, ByReference) else leaf

    return trees.map_leaves(deliver, tree)


def replace_unmade(leaf: Any) -> Any:
    """Replace a reference whose value does not exist yet by a stand-in, in a call that only requests shapes.

    Other references get the handle with which they would arrive in another process: theirs is only a shape here.
    """
    if isinstance(leaf, ByReference):
        return ByReference(replace_unmade(leaf.rref))
    if isinstance(leaf, RRef) and leaf.token is not None:
        key: Any = leaf.claim.key
        return RRef.of(StandIn(key.owner, *key.results.known))
    return RRef.of(leaf.claim) if isinstance(leaf, RRef) else leaf
