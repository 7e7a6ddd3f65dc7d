"""The other workers, as one worker sees them: which are alive, which are lost and why.

MPI or the operating system notices a dead process, but neither notices a hung process. So a worker that waits for an
answer asks its peer now and then for a sign of life. The peer's primary thread replies, or a thread that waits there:
never the thread that is busy with users' code.

While this process is stopped itself (Ctrl-Z, a suspended machine, a thread that keeps the GIL), it receives nothing
either: that time does not count as silence of its peers.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable

from jdistgrad.config import settings
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import ON_LOST, Mailbox, WorkerPart
from jdistgrad.wire.message import Message, MessageType

log = logging.getLogger("jdistgrad.rpc")


class Liveness:
    """The choice of the peers to ask for a sign of life, and of those to give up: a state machine without clock or I/O.

    Time passes only while ``look`` is called: a gap between two calls counts as half of ``interval`` at most. So no
    peer is given up without being asked: a peer that has been silent for ``limit`` was asked at least twice.
    """

    def __init__(self, interval: float, limit: float):
        self.interval, self.limit = min(interval, limit / 4), limit
        self._looked, self._awake = -math.inf, 0.0
        self._heard: dict[int, float] = {}  # by awaited peer: when it was last heard, and when it was last asked
        self._asked: dict[int, float] = {}

    def heard(self, peer: int) -> None:
        times = self._heard  # ``look`` may put others in its place meanwhile
        if peer in times:
            times[peer] = self._awake

    def look(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[int]]:
        """Return which awaited peers to ask and which to give up. Call this regularly, because it counts the time."""
        self._awake += min(now - self._looked, self.interval / 2)
        self._looked, awake = now, self._awake
        self._heard = {peer: self._heard.get(peer, awake) for peer in awaited}
        self._asked = {peer: self._asked.get(peer, awake) for peer in self._heard}
        ask, lost = [], []
        for peer, heard in self._heard.items():
            if awake - heard >= self.limit:
                lost.append(peer)
            elif awake - max(heard, self._asked[peer]) >= self.interval:
                self._asked[peer] = awake
                ask.append(peer)
        return ask, lost


Callback = Callable[[WorkerInfo, str], object]


class Peers(WorkerPart):
    """A worker's knowledge of its peers.

    Attributes:
      lost: the ranks that have been given up, each with the name and the reason; ``reasons``: the reason alone.
      silent: the ranks that were given up because they gave no sign of life, and may still be there.
      left: whether this worker has begun to send LEAVE.
    """

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self.liveness = Liveness(settings.heartbeat_seconds, settings.silence_seconds)
        self.lost: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self._callbacks: list[Callback] = []
        self._called: dict[int, int] = {}  # how many of them, by lost worker
        self._calling = threading.Lock()
        self.silent: set[int] = set()
        self.left = False

    @property
    def others(self) -> set[int]:
        """Return the ranks of the other workers that are not lost."""
        return set(range(self._mailbox.size)) - {self._mailbox.rank, *self.lost}

    def look(self, awaited: set[int], now: float) -> None:
        """Ask awaited peers for a sign of life; give up a peer that has given none for too long.

        Workers that are threads of this process die with it, so none of them can be lost alone.
        """
        mailbox = self._mailbox
        if mailbox.hands_over:
            return
        ask, silent = self.liveness.look(awaited - {mailbox.rank, *self.lost}, now)
        for peer in ask:
            mailbox.tell(peer, Message(MessageType.PING, mailbox.rank, 0))
        for peer in silent:
            self.lose_silent(peer, f"it gave no sign of life for {self.liveness.limit:g} s")

    def lose_silent(self, peer: int, reason: str) -> None:
        """Give up a peer that may still be there. In a world that survives it is killed, if it is on this machine."""
        if peer not in self.lost:
            self.silent.add(peer)
        self.lose(peer, reason)
        mailbox = self._mailbox
        if peer in self.silent and mailbox.survives and mailbox.transport.kill(peer):
            self.silent.discard(peer)

    def lose(self, peer: int, reason: str) -> None:
        """Give a peer up: every part does without it, and present and later calls to it fail."""
        info = self._mailbox.directory.workers[peer]
        self.reasons.setdefault(peer, reason)
        why = self.lost.setdefault(peer, f"{info} is lost: {reason}")
        for part in self._mailbox.parts:
            part.on_lost(info, why)
        self.call_on_lost()

    def call_on_lost(self, *more: Callback) -> None:
        """Add callbacks; run each, on other threads, for the lost workers for which it has not run."""
        with self._calling:
            self._callbacks += more
            lost = list(self.lost)
            new = [(peer, one) for peer in lost for one in self._callbacks[self._called.get(peer, 0) :]]
            self._called = dict.fromkeys(lost, len(self._callbacks))
        for peer, callback in new:
            self._mailbox.run_callbacks(ON_LOST, callback, peer, functools.partial(self._run, callback, peer))

    def _run(self, callback: Callback, peer: int) -> None:
        info = self._mailbox.directory.workers[peer]
        try:
            callback(info, self.reasons[peer])
        except Exception:
            log.exception("%s: a callback of on_lost failed for %s", self._mailbox.info, info)

    def leave(self, why: str) -> None:
        self.left, mailbox = True, self._mailbox
        for peer in self.others:
            mailbox.tell(peer, Message(MessageType.LEAVE, mailbox.rank, 0, why))
