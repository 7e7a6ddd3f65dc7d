"""What a worker stops holding: scopes that are closed, values whose last weight has come home."""

import collections
import logging
from collections.abc import Collection
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.references.claims import ClaimTable
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.wire.message import Kind, Message

log = logging.getLogger("jdistgrad.rpc")


class Releasing:
    """What one worker does when it, or another one, needs something no longer.

    Arguments:
      lost: the workers that need not be told any more.
    """

    def __init__(self, mailbox: Mailbox, scopes: ScopeTable, claims: ClaimTable, lost: Collection[int]):
        self._mailbox, self._scopes, self._claims, self._lost = mailbox, scopes, claims, lost
        self._abandoned = collections.deque[int]()

    def abandon_scope(self, identifier: int) -> None:
        """Close a scope soon. Safe where garbage is collected."""
        self._abandoned.append(identifier)

    def close_scope(self, identifier: int) -> None:
        """Let go of a scope, here and on every worker that was called in it."""
        mailbox, scope = self._mailbox, self._scopes.release(identifier)
        if scope is None:
            return
        peers, contents = scope.close()
        for peer in peers - {mailbox.rank, *self._lost}:
            self._tell(peer, Message(Kind.RELEASE, mailbox.rank, identifier))
        for content in contents:
            content.close()

    def closed_elsewhere(self, scope: int) -> None:
        """Somebody has closed a scope: let go of what is kept for it here, and tell those who were called from here."""
        try:
            self.close_scope(scope)
        finally:
            self._mailbox.work.served()

    def die(self, freed: list[Any]) -> None:
        """Let values die. References among them send their weight home: until then this worker is busy."""
        freed.clear()
        self._mailbox.work.served()

    def flush(self) -> None:
        """Close abandoned scopes, and send dropped weights home."""
        while self._abandoned:
            self.close_scope(self._abandoned.popleft())
        for owner, dropped in self._claims.dropped().items():
            home = [(identifier, weight.units, weight.scale) for identifier, weight in dropped]
            self._tell(owner, Message(Kind.DROP, self._mailbox.rank, 0, home))

    def _tell(self, peer: int, message: Message) -> None:
        try:
            self._mailbox.post(peer, message)
        except (errors.WorkerLostError, errors.WorldClosedError):
            log.debug("%s: rank %d has gone before it could be told of %s", self._mailbox.info, peer, message.kind.name)
