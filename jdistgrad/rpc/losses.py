"""The loss of a worker in a world that survives. Other worlds do not load this module.

Other parts fail the calls and collectives that wait for the lost worker (``WorkerPart.on_lost``). This part fails the
values that the worker was creating and the contexts that it took part in, closes the contexts that it opened, and
notifies the other survivors, so that all lose the same workers. The weight of references that the lost worker held is
gone: their owners keep those values until the world is shut down.

A context may have reached this worker through the lost one alone, which would have announced its end. So from then on
the opener announces the end of a context to all workers, and a LOST message has the contexts that its sender closed.
"""

import functools
import threading
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import WorkerPart
from jdistgrad.rpc.scopes import Scope
from jdistgrad.wire.message import Message, MessageType, spell, worker_of
from jdistgrad.wire.transport import Task


class Losses(WorkerPart):
    """The lost workers, as one worker deals with them.

    Arguments:
      worker: a ``Worker``, of a layer above.
    """

    def __init__(self, worker: Any):
        self._worker, self._peers, self._scopes = worker, worker.peers, worker.scopes
        self._lost = set[int]()
        self._lock = threading.Lock()

    def take(self, message: Message) -> Task | None:
        """Handle a LOST or a BREAK."""
        worker = self._worker
        if message.kind is MessageType.BREAK:
            task: Task = worker.work.counted(functools.partial(self._fail_context, message))
            return task
        why, silent, closed = message.body
        if message.id == worker.rank:
            text = f"the other workers go on without {worker.info}, says rank {message.source}: {why}"
            worker.given_up_by.add(message.source)
            worker.fail(errors.WorkerLostError(text, worker=worker.info))
            return None
        (self._peers.lose_silent if silent else self._peers.lose)(message.id, why)
        for identifier in self._scopes.open.keys() & closed:
            worker.run_counted(functools.partial(worker.releasing.close_scope, identifier))
        return None

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        worker, lost = self._worker, peer.rank
        with self._lock:
            if lost in self._lost:
                return
            self._lost.add(lost)
        closed, reason = self._scopes.lose(lost), self._peers.reasons[lost]
        worker.tell(lost, self._message(lost, (reason, False, [])))  # it may only be stopped
        worker.transport.lose(lost)
        for one in self._peers.others:
            worker.tell(one, self._message(lost, (reason, lost in self._peers.silent, closed)))
        error = errors.WorkerLostError(f"the value was not made: {self._peers.lost[lost]}", worker=peer)
        for value in worker.references.owned.give_up(lost, error):
            worker.run_counted(functools.partial(value.set_exception, error))
        worker.run_counted(functools.partial(self._leave_contexts, lost))

    def _message(self, lost: int, body: Any) -> Message:
        return Message(MessageType.LOST, self._worker.rank, lost, body)

    def _leave_contexts(self, lost: int) -> None:
        """Close the contexts that a lost worker opened; fail those in which this worker called it, on all workers."""
        worker = self._worker
        for identifier in self._scopes.identifiers():
            scope = self._scopes.open.get(identifier)
            if worker_of(identifier) == lost:
                worker.releasing.close_scope(identifier)
            elif scope is not None and lost in scope.peers():
                self._give_up(scope, lost)
                for peer in self._peers.others:
                    body = lost, self._peers.reasons[lost]
                    worker.tell(peer, Message(MessageType.BREAK, worker.rank, identifier, body))

    def _fail_context(self, message: Message) -> None:
        lost, why = message.body
        self._peers.lose(lost, why)
        scope = self._scopes.open.get(message.id)
        if scope is not None:
            self._give_up(scope, lost)

    def _give_up(self, scope: Scope, lost: int) -> None:
        text = (
            f"what is missing in context {spell(scope.id)} will not come, since a worker that took part in it is lost: "
            f"{self._peers.lost[lost]}. Compute it again in a new context, without this worker."
        )
        info = self._worker.directory.workers[lost]
        scope.give_up(errors.WorkerLostError(text, worker=info, context=scope.id))
