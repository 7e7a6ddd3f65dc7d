"""The other workers, as one of them sees them: who is alive, who is lost and why."""

import logging
from typing import TYPE_CHECKING

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.members.liveness import Liveness
from jdistgrad.wire.message import Kind, Message

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

log = logging.getLogger("jdistgrad.rpc")


class Peers:
    """What a worker knows of the others. ``hung``: the first that gave no sign of life."""

    def __init__(self, worker: "Worker"):
        self._worker = worker
        self._liveness = Liveness(settings.heartbeat_seconds, settings.silence_seconds)
        self.lost: dict[int, str] = {}
        self.hung: WorkerInfo | None = None

    def heard(self, peer: int) -> None:
        self._liveness.heard(peer)

    def check(self, call: Pending) -> None:
        """Raise where a call is to somebody who is lost."""
        if call.peer.rank in self.lost:
            raise errors.WorkerLostError(f"{call}: {self.lost[call.peer.rank]}", worker=call.peer)

    def look(self, awaited: set[int], now: float) -> None:
        """Ask those whose answer is awaited for a sign of life; give up who has given none for too long.

        Workers that are threads of this process die with it: none of them is lost alone.
        """
        worker = self._worker
        if worker.transport.hands_over:
            return
        ask, silent = self._liveness.look(awaited - {worker.rank}, now)
        for peer in ask:
            worker.post(peer, Message(Kind.PING, worker.rank, 0))
        for peer in silent:
            self.hung = self.hung or worker.directory.workers[peer]
            self.lose(peer, f"it gave no sign of life for {self._liveness.limit:g} s")

    def lose(self, peer: int, reason: str) -> None:
        """Give a peer up: calls to it fail now and later."""
        info = self._worker.directory.workers[peer]
        why = self.lost.setdefault(peer, f"{info} is lost: {reason}")
        self._worker.calls.fail_all(lambda call: errors.WorkerLostError(f"{call}: {why}", worker=info), peer)
        self._worker.watchdog.lost(peer, why)

    def leave(self, why: str) -> None:
        """Tell everybody else that this worker goes."""
        worker = self._worker
        for peer in range(worker.size):
            if peer != worker.rank and peer not in self.lost:
                try:
                    worker.post(peer, Message(Kind.LEAVE, worker.rank, 0, why))
                except errors.WorkerLostError:
                    log.debug("%s: rank %d has gone before", worker.info, peer)
