"""A worker: its parts, and the dispatch of messages to them. All decisions are made in the parts."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc import current
from jdistgrad.rpc.caller import Caller
from jdistgrad.rpc.closing import Closing
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.meetings import Groups
from jdistgrad.rpc.peers import Peers
from jdistgrad.rpc.pending import Pending
from jdistgrad.rpc.references import References, Releasing
from jdistgrad.rpc.scopes import Inbox, Key, ScopeTable
from jdistgrad.rpc.server import Served
from jdistgrad.rpc.watchdog import Watchdog
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import ABOUT_LOSSES, ANSWERS, CALLS, WORK, Message, MessageType, Parcel, ids_of
from jdistgrad.wire.transport import Task


class Worker(Mailbox):
    """A worker of a world.

    The thread that moves messages calls ``receive`` and ``tick``; neither waits nor runs users' code. Calls are served
    on threads that may wait, and the thread that asked opens the answer.

    Attributes:
      kept: what users of the worker keep as long as this world exists, by names.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept: dict[str, Any] = {}
        self.given_up_by: set[int] = set()  # the workers that go on without this one
        self.scopes, self.messages = ScopeTable(self.rank), ids_of(self.rank)
        self.peers = self.add(Peers(self))
        self.calls = self.add(Caller(self, self._check))
        self.references = self.add(References(self, self.calls))
        self.releasing = self.add(Releasing(self, self.scopes, self.references, self.peers.lost))
        self.closing = self.add(Closing(self, self.peers, self.releasing.tick))
        self.groups = self.add(Groups())
        self.watchdog = self.add(Watchdog(self, self.calls, self.peers, self.closing, self.groups.sent))
        if self.survives:
            from jdistgrad.rpc.losses import Losses

            self.losses = self.add(Losses(self))  # the last to do without a lost worker
        self.rpc_sync, self.rpc_async = self.calls.rpc_sync, self.calls.rpc_async
        self.handled_before = sys.exception()  # ``init`` may be called in an ``except`` block

    def _check(self, call: Pending) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)  # else it would grow each time it is raised
        if self.closed:
            raise errors.NotInitializedError(f"{call}: this world has been shut down. Call jdistgrad.init() again.")
        if call.peer.rank in self.peers.lost:
            raise errors.WorkerLostError(f"{call}: {self.peers.lost[call.peer.rank]}", worker=call.peer)

    def lost(self, peer: int, why: str) -> None:
        self.peers.silent.discard(peer)
        if self.survives and self.closing.told_to_close.is_set():
            self.closing.gone.add(peer)
        else:
            self.peers.lose(peer, why)

    def push(self, to: int, key: Key, value: Any) -> None:
        """Put a value into the inbox that a worker has in the current scope. The value's arrays must not change."""
        scope = current.current_scope()
        if scope is None:
            raise errors.ContextError("a value is pushed outside any context")
        if to == self.rank:
            scope.content(Inbox).arrived(lambda: (key, value))
            self.transport.wake()
            return
        scope.includes(to)
        with put_off_interrupt():
            self.post(to, Message(MessageType.PUSH, self.rank, scope.id, (key, value)), snapshot=False)

    # Messages in.

    def word(self, source: int, key: int, group: int, word: bytes) -> None:
        if not (self.survives and source in self.peers.lost):
            self.peers.liveness.heard(source)
            self.groups.arrivals(group).of(key).add(source, word)

    def receive(self, message: Message) -> Task | None:
        kind, body, source = message.kind, message.body, message.source
        if self.survives and source in self.peers.lost:
            return None
        if isinstance(body, Parcel) and body.attached:
            body.attached = self.references.arrived(body.attached)
        self.peers.liveness.heard(source)
        if kind in CALLS:
            self.work.begin(source)
            value = self.references.owned.announce(message.id).value if kind is MessageType.REMOTE else None
            return Served(self, self.scopes, message, value).serve
        try:
            if kind not in ANSWERS:
                return self._take_note(message)
            self.calls.answered(message)
            return None
        finally:
            if kind in WORK:
                self.work.received(source)

    def _take_note(self, message: Message) -> Task | None:
        kind, source = message.kind, message.source
        if kind is MessageType.MEET:
            self.groups.arrived(message)
        elif kind is MessageType.PUSH:
            try:
                self.scopes.enter(message.id).content(Inbox).arrived(functools.partial(self.open, message))
            except errors.ContextError as closed:
                self.refuse(source, "a value", closed)
        elif kind is MessageType.RELEASE:
            return self.work.counted(functools.partial(self.releasing.close_scope, message.id))
        elif kind is MessageType.DROP:
            freed = self.references.returned(message.body)
            if freed:
                self.run_counted(freed.clear)  # until references inside the values have returned their weight
        elif kind is MessageType.PING:
            self.post(source, Message(MessageType.PONG, self.rank, 0))
        elif kind is MessageType.LEAVE:
            self.lost(source, message.body)
        elif self.survives and kind in ABOUT_LOSSES:
            return self.losses.take(message)
        else:
            self.closing.handle(message)
        return None

    # Housekeeping.

    def tick(self, now: float) -> None:
        self.threads.resume()  # tasks for which there was no thread
        for part in self.parts:
            part.tick(now)
        self.peers.look(set().union(*(part.awaited() for part in self.parts)), now)

    # The end.

    def fail(self, error: BaseException) -> None:
        """Break the world: everything that waits in it ends with this error."""
        if self.failure is None:
            self.failure = error
        self.calls.fail_all(lambda call: error)

    def close(self, *, graceful: bool) -> None:
        """Stop this worker. Calls still in flight fail, and references become stale."""
        self.closed, self.handled_before = True, None
        self.calls.fail_all(lambda call: errors.WorldClosedError(f"{call}: the world was shut down meanwhile"))
        self.transport.close(graceful=graceful and self.failure is None)
        for identifier in self.scopes.identifiers():
            self.releasing.close_scope(identifier)
        self.threads.close()
        self.references.owned.clear()


# The functions of ``current``, with the return type that the layers above need.
current_worker: Callable[[], Worker] = current.current_resident
find_worker: Callable[[], Worker | None] = current.find_resident
