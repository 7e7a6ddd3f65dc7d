"""Equal lines of several ranks, folded into one that names the ranks: a state machine without clock or I/O.

A line waits for its equals for a fraction of a second. Each rank's lines keep their order: a line is only folded into
one that came after the rank's line before. So a traceback that three ranks print is printed once, however the ranks'
lines mix. The ranks must not wait for this: where they print much at once, their output passes as it is for a while.
"""

import bisect
import collections
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence

HOLD_SECONDS = 0.2
MOST = 1000  # lines that are held; where there are more, all passes unfolded for HOLD_SECONDS
BURST = 10_000  # lines taken in HOLD_SECONDS; the same where there are more
LONGEST = 1 << 16  # bytes of a line that are held

NUMBER = operator.attrgetter("number")


@dataclasses.dataclass(slots=True)
class Held:
    """Text that is to be printed. ``ranks``: those that printed it, if others may join them; else none."""

    number: int
    text: bytes
    since: float
    ranks: list[int]


class Folding:
    """The lines of several ranks on their way, and other output between them, which passes unchanged."""

    def __init__(self, size: int):
        self._size = size
        self._held: collections.deque[Held] = collections.deque()
        self._numbers = itertools.count()
        self._latest: dict[int | None, int] = {}  # of each rank, the number of what it printed last
        self._equal: dict[bytes, list[Held]] = {}  # the lines that are held and others may join, in order
        self._partial: dict[int, tuple[bytes, float]] = {}  # beginnings of lines, and since when
        self._begun: set[int] = set()  # ranks whose line has been printed in part
        self._passing_until = 0.0
        self._taken, self._counted_from = 0, 0.0

    def take(self, rank: int | None, data: bytes, now: float) -> None:
        """Take output of a rank, or of mpirun itself (None)."""
        if rank is None:
            self._hold(rank, data, now)
            return
        before, since = self._partial.pop(rank, (b"", now))
        whole, end, rest = (before + data).rpartition(b"\n")
        if end:
            self._take_lines(rank, whole + end, now)
        if rest:
            self._partial[rank] = rest, now if end else since
        if len(rest) > LONGEST:
            self._release(rank, rest, now)

    def _take_lines(self, rank: int, text: bytes, now: float) -> None:
        if now - self._counted_from >= HOLD_SECONDS:
            self._taken, self._counted_from = 0, now
        position = 0
        if rank in self._begun:
            self._begun.remove(rank)
            position = text.index(b"\n") + 1
            self._hold(rank, text[:position], now)
        while position < len(text) and now >= self._passing_until:
            end = text.index(b"\n", position) + 1
            self._fold(rank, text[position:end], now)
            position = end
        if position < len(text):
            self._hold(rank, text[position:], now)

    def _fold(self, rank: int, line: bytes, now: float) -> None:
        self._taken += 1
        if self._taken > BURST or len(self._held) >= MOST:
            self._passing_until = now + HOLD_SECONDS
        equal = self._equal.setdefault(line, [])
        k = bisect.bisect(equal, self._latest.get(rank, -1), key=NUMBER)
        if k < len(equal):
            equal[k].ranks.append(rank)
            self._latest[rank] = equal[k].number
            return
        equal.append(self._hold(rank, line, now))
        equal[-1].ranks.append(rank)

    def _hold(self, rank: int | None, text: bytes, now: float) -> Held:
        one = Held(next(self._numbers), text, now, [])
        self._held.append(one)
        self._latest[rank] = one.number
        return one

    def due(self) -> float | None:
        """Return when there will be something to print even if nothing more comes; None: never."""
        times = [self._held[0].since] if self._held else []
        return min([*times, *(since for _, since in self._partial.values())], default=None)

    def ready(self, now: float) -> bytes:
        """Return what to print now, in order: lines that all ranks have printed, or that have been held long enough."""
        for rank, (text, since) in list(self._partial.items()):
            if now - since >= HOLD_SECONDS:
                self._release(rank, text, now)
        printed = []
        while self._held and self._is_ready(self._held[0], now):
            printed.append(self._printed())
        return b"".join(printed)

    def end(self) -> bytes:
        """Return all that is left."""
        for rank, (text, since) in list(self._partial.items()):
            self._release(rank, text, since)
        return b"".join([self._printed() for _ in range(len(self._held))])

    def _printed(self) -> bytes:
        one = self._held.popleft()
        if one.ranks:
            del self._equal[one.text][0]
            if not self._equal[one.text]:
                del self._equal[one.text]
        return shown(one)

    def _release(self, rank: int, text: bytes, now: float) -> None:
        """Let the beginning of a line be printed: it is a prompt or a progress bar, whose end may be far."""
        del self._partial[rank]
        self._begun.add(rank)
        self._hold(rank, text, now)

    def _is_ready(self, one: Held, now: float) -> bool:
        return len(one.ranks) in (0, self._size) or now - one.since >= HOLD_SECONDS or now < self._passing_until


def shown(one: Held) -> bytes:
    return f"[ranks {spelled(sorted(one.ranks))}] ".encode() + one.text if len(one.ranks) > 1 else one.text


def spelled(ranks: Sequence[int]) -> str:
    """Return ranks in order as people write them: 0-2, 5."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(ranks))


def runs(ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        yield members[0], members[-1]
