"""Who has been silent for too long: a state machine without clock or I/O.

A dead process is noticed by MPI or the operating system. A hung one is noticed by nobody: whoever waits for an answer
asks now and then whether the other side still lives, and its progress thread (not the busy one) replies.

Who stands still himself (Ctrl-Z, a suspended machine, one thread that keeps Python's lock) hears nothing either: that
time is nobody's silence.
"""

import dataclasses
import math
from collections.abc import Iterable


@dataclasses.dataclass(slots=True)
class Watch:
    """One peer somebody waits for: when it was last heard, when it was last asked."""

    heard: float
    asked: float


class Liveness:
    """Tells whom to ask for a sign of life and whom to give up.

    Its own time is that in which somebody looks: a gap between two looks counts as half of ``interval`` at most. So
    nobody is given up who was not asked: whoever has been silent for ``limit`` was asked twice at least.
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
        """Peers to ask and peers to give up, of those awaited now. Call it again and again; it keeps the times."""
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
