"""The detection of peers that have been silent for too long: a state machine without clock or I/O.

MPI or the operating system notices a dead process, but neither notices a hung process. So a worker that waits for an
answer asks its peer now and then for a sign of life. The peer's primary thread replies, or a thread that waits there:
never the thread that is busy with users' code.

A process that itself stands still (Ctrl-Z, a suspended machine, a thread that keeps the GIL) hears nothing either: that
time does not count as silence of its peers.
"""

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(slots=True)
class Watch:
    """An awaited peer: when it was last heard, and when it was last asked."""

    heard: float
    asked: float


class Liveness:
    """The choice of the peers to ask for a sign of life, and of the peers to give up.

    Time passes only while ``look`` is called: a gap between two calls counts as half of ``interval`` at most. So no
    peer is given up without being asked: a peer that has been silent for ``limit`` was asked at least twice.
    """

    def __init__(self, interval: float, limit: float):
        self.interval, self.limit = min(interval, limit / 4), limit
        self._looked, self._awake = -math.inf, 0.0
        self._watched: dict[int, Watch] = {}

    def heard(self, peer: int) -> None:
        watch = self._watched.get(peer)
        if watch is not None:
            watch.heard = self._awake

    def look(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[int]]:
        """Return which awaited peers to ask and which to give up. Call this regularly, because it counts the time."""
        self._awake += min(now - self._looked, self.interval / 2)
        self._looked, awake = now, self._awake
        self._watched = {peer: self._watched.get(peer) or Watch(awake, awake) for peer in awaited}
        ask, lost = [], []
        for peer, watch in self._watched.items():
            if awake - watch.heard >= self.limit:
                lost.append(peer)
            elif awake - max(watch.heard, watch.asked) >= self.interval:
                watch.asked = awake
                ask.append(peer)
        return ask, lost
