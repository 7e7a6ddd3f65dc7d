"""What a worker stops holding: scopes that are closed, values whose last weight has come home."""

import collections
import logging
from typing import TYPE_CHECKING, Any

from jdistgrad import errors
from jdistgrad.wire.message import Kind, Message

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

log = logging.getLogger("jdistgrad.rpc")


class LettingGo:
    """What one worker does when it, or another one, needs something no longer."""

    def __init__(self, worker: "Worker"):
        self._worker = worker
        self._abandoned = collections.deque[int]()

    def abandon_scope(self, identifier: int) -> None:
        """Close a scope soon. Safe where garbage is collected."""
        self._abandoned.append(identifier)

    def close_scope(self, identifier: int) -> None:
        """Let go of a scope, here and on every worker that was called in it."""
        worker, scope = self._worker, self._worker.scopes.release(identifier)
        if scope is None:
            return
        peers, contents = scope.close()
        for peer in peers - {worker.rank, *worker.peers.lost}:
            self._tell(peer, Message(Kind.RELEASE, worker.rank, identifier))
        for content in contents:
            content.close()

    def closed_elsewhere(self, scope: int) -> None:
        """Somebody has closed a scope: let go of what is kept for it here, and tell those who were called from here."""
        try:
            self.close_scope(scope)
        finally:
            self._worker.traffic.served()

    def die(self, freed: list[Any]) -> None:
        """Let values die. References among them send their weight home: until then this worker is busy."""
        freed.clear()
        self._worker.traffic.served()

    def flush(self) -> None:
        """Close abandoned scopes, and send dropped weights home."""
        while self._abandoned:
            self.close_scope(self._abandoned.popleft())
        for owner, dropped in self._worker.claims.dropped().items():
            home = [(identifier, weight.units, weight.scale) for identifier, weight in dropped]
            self._tell(owner, Message(Kind.DROP, self._worker.rank, 0, home))

    def _tell(self, peer: int, message: Message) -> None:
        try:
            self._worker.post(peer, message)
        except (errors.WorkerLostError, errors.WorldClosedError):
            log.debug("%s: rank %d has gone before it could be told of %s", self._worker.info, peer, message.kind.name)
