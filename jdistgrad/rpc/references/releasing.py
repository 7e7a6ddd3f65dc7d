"""The release of closed scopes, and of values whose last weight has been returned."""

import collections
import logging
from collections.abc import Collection, Iterable

from jdistgrad import errors
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.references.claims import emptied
from jdistgrad.rpc.references.table import References
from jdistgrad.rpc.scopes import Scope, ScopeTable
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Kind, Message

log = logging.getLogger("jdistgrad.rpc")


class Releasing:
    """The part of a worker that releases scopes and freed values, and returns dropped weights.

    Arguments:
      lost: the lost workers, which are not notified.
    """

    def __init__(self, mailbox: Mailbox, scopes: ScopeTable, references: References, lost: Collection[int]):
        self._mailbox, self._scopes, self._references, self._lost = mailbox, scopes, references, lost
        self._abandoned = collections.deque[int]()

    def abandon_scope(self, identifier: int) -> None:
        """Close a scope at the next ``flush``. Safe to call during garbage collection."""
        self._abandoned.append(identifier)

    def close_scope(self, identifier: int) -> None:
        """Release a scope, here and on every worker that was called in it.

        Raises:
          WireError: one of them, or several, could not be told.
        """
        with put_off_interrupt():  # or a part of the workers might never be told
            scope = self._scopes.release(identifier)
            if scope is not None:
                self._end(scope)

    def _end(self, scope: Scope) -> None:
        mailbox, (peers, contents) = self._mailbox, scope.close()
        try:
            release = Message(Kind.RELEASE, mailbox.rank, scope.id)
            self._tell_all([(peer, release) for peer in peers - {mailbox.rank, *self._lost}])
        finally:
            for content in contents:
                content.close()

    def flush(self) -> None:
        """Close abandoned scopes, and return dropped weights to their owners."""
        if self._abandoned or self._references.has_news:
            with self._mailbox.work.under_way():  # until the messages count: the world might close before they are sent
                self._tell_news()

    def _tell_news(self) -> None:
        for identifier in emptied(self._abandoned):
            self.close_scope(identifier)
        here, references = self._mailbox.rank, self._references
        dropped = [(owner, Message(Kind.DROP, here, 0, weights)) for owner, weights in references.dropped().items()]
        gone = [(peer, Message(Kind.FORGET, here, 0, values)) for peer, values in references.to_forget().items()]
        self._tell_all([*dropped, *gone])

    def _tell_all(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Send messages to workers. One that cannot be sent keeps no other back, but is an error."""
        failed = []
        for peer, message in messages:
            try:
                self.tell(peer, message)
            except errors.WireError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def tell(self, peer: int, message: Message) -> None:
        """Send a message to a worker, if it is still there."""
        try:
            self._mailbox.post(peer, message)
        except (errors.WorkerLostError, errors.WorldClosedError):
            log.debug("%s: rank %d has gone before it could be told of %s", self._mailbox.info, peer, message.kind.name)
