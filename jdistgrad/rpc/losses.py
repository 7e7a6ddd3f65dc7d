"""What a worker does when another is lost, so that the world can go on without it.

The calls that wait for the lost worker fail first (``worker``). Here its account of references is settled
(``weights``), the contexts that it opened are let go, those that it took part in fail what still waits in
them, and the callbacks of ``on_lost`` run. The survivors tell each other whom they have lost, so that all give up the
same workers.

A context may have reached this worker through the lost one alone, which would have told of its end. So each survivor
tells the opener of each context that it still takes part; the opener answers if the context has ended, or if it fails.
"""

import functools
import logging
import threading
from collections.abc import Callable

from jdistgrad import errors
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import ON_LOST, Mailbox
from jdistgrad.rpc.peers import Peers
from jdistgrad.rpc.references import References, Releasing
from jdistgrad.rpc.scopes import Scope, ScopeTable
from jdistgrad.wire.message import Kind, Message, spell, worker_of

Callback = Callable[[WorkerInfo, str], object]

log = logging.getLogger("jdistgrad.rpc")


class Losses:
    """The lost workers, as one worker deals with them.

    Attributes:
      busy: whether settlements of accounts are still to come, or what they have left free is still here.
    """

    def __init__(
        self, mailbox: Mailbox, peers: Peers, references: References, releasing: Releasing, scopes: ScopeTable
    ):
        self._mailbox, self._peers, self._references = mailbox, peers, references
        self._releasing, self._scopes = releasing, scopes
        self._lost: dict[int, str] = {}  # with the reasons
        self._settled: set[tuple[int, int]] = set()  # settlements that have come: survivor and lost worker
        self.busy = False
        self._asked: list[tuple[int, int, int]] = []  # lost worker, owner that asks to settle, what to forget before
        self._callbacks: list[Callback] = []
        self._lock = threading.RLock()

    def on_lost(self, callback: Callback) -> None:
        with self._lock:
            self._callbacks.append(callback)
            before = list(self._lost)
        for lost in before:
            self._call(callback, lost)

    def _call(self, callback: Callback, lost: int) -> None:
        info = self._mailbox.directory.workers[lost]

        def run() -> None:
            try:
                callback(info, self._lost[lost])
            except Exception:
                log.exception("%s: a callback of on_lost failed for %s", self._mailbox.info, info)

        self._mailbox.run_callbacks(ON_LOST, callback, lost, run)

    def awaited(self) -> set[int]:
        """Return the ranks of the workers whose silence would keep this worker from freeing values."""
        return {survivor for survivor, _ in self._open_settlements()} if self.busy else set()

    def lose(self, lost: int, reason: str) -> None:
        with self._lock:
            if lost in self._lost:
                return
            self._lost[lost] = reason
            callbacks = list(self._callbacks)
            if self._mailbox.survives:
                self._settle(lost)
        for callback in callbacks:
            self._call(callback, lost)

    def _tell(self, peer: int, message: Message) -> None:
        """Tell another worker of a loss. If that fails, the others must still be told."""
        try:
            self._releasing.tell(peer, message)
        except errors.WireError as error:
            log.error("%s: what rank %d had to know of a loss was not sent: %s", self._mailbox.info, peer, error)

    # References.

    def _settle(self, lost: int) -> None:
        mailbox, why, self.busy = self._mailbox, self._lost[lost], True
        self._tell(lost, Message(Kind.LOST, mailbox.rank, lost, (why, 0, False)))  # it may only stand still
        mailbox.transport.lose(lost)
        info, text = mailbox.directory.workers[lost], f"the value was not made: {self._peers.lost[lost]}"
        error = errors.WorkerLostError(text, worker=info)
        for entry in self._references.lose(lost, error):
            mailbox.run_counted(functools.partial(entry.value.set_exception, error))
        for peer in set(range(mailbox.size)) - {mailbox.rank, *self._lost}:
            count = self._references.forgettable[peer]
            self._tell(peer, Message(Kind.LOST, mailbox.rank, lost, (why, count, lost in self._peers.silent)))
        self._scopes.lost.add(lost)
        mailbox.run_counted(functools.partial(self._let_go_of_contexts, lost))
        self._end_hold()

    def lost_elsewhere(self, message: Message) -> None:
        """Lose a worker that another has lost, which asks for the settlement of what it owns."""
        lost, (why, count, silent) = message.id, message.body
        (self._peers.lose_silent if silent else self._peers.lose)(lost, why)
        with self._lock:
            self._asked.append((lost, message.source, count))
            self._answer()

    def forget(self, message: Message) -> None:
        """Forget references whose values are gone, as their owner says; it may wait with a settlement for that."""
        with self._lock:
            self._references.forget(message.source, message.body)
            self._answer()

    def _answer(self) -> None:
        """Settle with the owners that ask for it, once everything is forgotten that they freed before."""
        asked, self._asked = self._asked, []
        for lost, owner, count in asked:
            if self._references.forgotten[owner] >= count:
                balances = self._references.settle(lost, owner)
                self._tell(owner, Message(Kind.SETTLE, self._mailbox.rank, lost, balances))
            elif owner not in self._lost:
                self._asked.append((lost, owner, count))

    def settled(self, message: Message) -> None:
        with self._lock:
            self._references.returned(message.source, message.body)
            self._settled.add((message.source, message.id))
            self._end_hold()

    def _open_settlements(self) -> set[tuple[int, int]]:
        """Return the settlements that have not come, from survivors only. While any is open, no value is freed."""
        lost, mailbox = set(self._lost), self._mailbox
        survivors = set(range(mailbox.size)) - lost - {mailbox.rank}
        return {(survivor, one) for survivor in survivors for one in lost} - self._settled

    def _end_hold(self) -> None:
        if not self._open_settlements():
            self._references.owned.held = False

    def look(self) -> None:
        """Free what only lost workers held, when their calls, which may use it, have been served."""
        if not self.busy:
            return
        with self._lock:
            if not self._open_settlements() and not any(self._mailbox.work.serving[one] for one in self._lost):
                freed = self._references.sweep()
                self._mailbox.run_counted(freed.clear)
                self.busy = False

    # Contexts.

    def _let_go_of_contexts(self, lost: int) -> None:
        taking_part: dict[int, list[tuple[int, bool]]] = {}
        for identifier in self._scopes.identifiers():
            scope, opener = self._scopes.open.get(identifier), worker_of(identifier)
            if opener == lost:
                self._releasing.close_scope(identifier)
            elif scope is not None and opener == self._mailbox.rank:
                self._fail_if_lost(scope, lost, reached=lost in scope.peers())
            elif scope is not None:
                taking_part.setdefault(opener, []).append((identifier, lost in scope.peers()))
        for opener, contexts in taking_part.items():
            self._tell(opener, Message(Kind.PARTAKE, self._mailbox.rank, lost, contexts))

    def takes_part(self, message: Message) -> None:
        """Answer a worker that takes part in contexts which were opened here."""
        for identifier, reached in message.body:
            scope = self._scopes.open.get(identifier)
            try:
                if scope is None:
                    raise errors.ContextError("closed")
                scope.includes(message.source)
            except errors.ContextError:
                self._tell(message.source, Message(Kind.RELEASE, self._mailbox.rank, identifier))
                continue
            if scope.error is not None:
                self._tell_failed(message.source, scope, message.id)
            self._fail_if_lost(scope, message.id, reached=reached)

    def _fail_if_lost(self, scope: Scope, lost: int, *, reached: bool) -> None:
        """Fail a context that was opened here, and that a lost worker took part in, on all that take part."""
        if reached and scope.error is None:
            scope.give_up(self._error(scope.id, lost))
            for peer in scope.peers():
                self._tell_failed(peer, scope, lost)

    def _tell_failed(self, peer: int, scope: Scope, lost: int) -> None:
        if peer not in self._lost and peer != self._mailbox.rank:
            self._tell(peer, Message(Kind.BREAK, self._mailbox.rank, scope.id, (lost, self._lost[lost])))

    def broken(self, message: Message) -> None:
        lost, why = message.body
        self._peers.lose(lost, why)
        scope = self._scopes.open.get(message.id)
        if scope is not None:
            scope.give_up(self._error(message.id, lost))

    def _error(self, context: int, lost: int) -> errors.WorkerLostError:
        text = (
            f"what is missing in context {spell(context)} will not come, since a worker that took part in it is lost: "
            f"{self._peers.lost[lost]}. Compute it again in a new context, without this worker."
        )
        return errors.WorkerLostError(text, worker=self._mailbox.directory.workers[lost], context=context)
