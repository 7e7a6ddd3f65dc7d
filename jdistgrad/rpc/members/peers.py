"""The other workers, as one of them sees them: who is alive, who is lost and why."""

import logging
from collections.abc import Callable

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.members.liveness import Liveness
from jdistgrad.wire.message import Kind, Message

log = logging.getLogger("jdistgrad.rpc")


class Peers:
    """What a worker knows of the others.

    Arguments:
      tell: called with each worker that is given up, and why.

    Attributes:
      lost: who has been given up, and why.
      hung: the first that gave no sign of life.
    """

    def __init__(self, mailbox: Mailbox, tell: Callable[[WorkerInfo, str], None]):
        self._mailbox, self._tell = mailbox, tell
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
        mailbox = self._mailbox
        if mailbox.hands_over:
            return
        ask, silent = self._liveness.look(awaited - {mailbox.rank}, now)
        for peer in ask:
            mailbox.post(peer, Message(Kind.PING, mailbox.rank, 0))
        for peer in silent:
            self.hung = self.hung or mailbox.directory.workers[peer]
            self.lose(peer, f"it gave no sign of life for {self._liveness.limit:g} s")

    def lose(self, peer: int, reason: str) -> None:
        """Give a peer up: calls to it fail now and later."""
        info = self._mailbox.directory.workers[peer]
        self._tell(info, self.lost.setdefault(peer, f"{info} is lost: {reason}"))

    def leave(self, why: str) -> None:
        """Tell everybody else that this worker goes."""
        mailbox = self._mailbox
        for peer in range(mailbox.size):
            if peer != mailbox.rank and peer not in self.lost:
                try:
                    mailbox.post(peer, Message(Kind.LEAVE, mailbox.rank, 0, why))
                except errors.WorkerLostError:
                    log.debug("%s: rank %d has gone before", mailbox.info, peer)
