"""Who has been silent for too long: a state machine without clock or I/O.

A dead process is noticed by MPI or the operating system. A hung one is noticed by nobody: whoever waits for an answer
asks now and then whether the other side still lives, and its progress thread (not the busy one) replies.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(slots=True)
class Watch:
    """One peer somebody waits for: when it was last heard, when it was last asked."""

    heard: float
    asked: float


class Liveness:
    """Tells whom to ask for a sign of life and whom to give up."""

    def __init__(self, interval: float, limit: float):
        self.interval, self.limit = interval, limit
        self._watched: dict[int, Watch] = {}

    def heard(self, peer: int, now: float) -> None:
        watch = self._watched.get(peer)
        if watch is not None:
            watch.heard = now

    def look(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[int]]:
        """Peers to ask and peers to give up, of those awaited now. Call it again and again; it keeps the times."""
        self._watched = {peer: self._watched.get(peer) or Watch(now, now) for peer in awaited}
        ask, lost = [], []
        for peer, watch in self._watched.items():
            if now - watch.heard >= self.limit:
                lost.append(peer)
            elif now - max(watch.heard, watch.asked) >= self.interval:
                watch.asked = now
                ask.append(peer)
        return ask, lost
