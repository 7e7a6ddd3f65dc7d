"""Equal lines of several ranks, folded into one that names the ranks: a state machine without clock or I/O.

A line waits for its equals for a fraction of a second. Each rank's lines keep their order: a line is only folded into
one that came after the rank's line before. So a traceback that three ranks print is printed once, however the ranks'
lines mix.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

HOLD_SECONDS = 0.2
MOST = 1000  # lines that are held


@dataclasses.dataclass(slots=True)
class Held:
    """Text that is to be printed. ``ranks``: those that printed it, if others may join them; else none."""

    text: bytes
    since: float
    ranks: list[int]


class Folding:
    """The lines of several ranks on their way, and other output between them, which passes unchanged."""

    def __init__(self, size: int):
        self._size = size
        self._held: list[Held] = []
        self._partial: dict[int, tuple[bytes, float]] = {}  # beginnings of lines, and since when
        self._begun: set[int] = set()  # ranks whose line has been printed in part

    def take(self, rank: int | None, data: bytes, now: float) -> None:
        """Take output of a rank, or of mpirun itself (None)."""
        if rank is None:
            self._held.append(Held(data, now, []))
            return
        before, since = self._partial.pop(rank, (b"", now))
        *lines, rest = (before + data).split(b"\n")
        for line in lines:
            self._take_line(rank, line + b"\n", now)
        if rest:
            self._partial[rank] = rest, now if lines else since

    def _take_line(self, rank: int, line: bytes, now: float) -> None:
        if rank in self._begun:
            self._begun.remove(rank)
            self._held.append(Held(line, now, []))
            return
        latest = next((k for k in range(len(self._held) - 1, -1, -1) if rank in self._held[k].ranks), -1)
        same = next((one for one in self._held[latest + 1 :] if one.ranks and one.text == line), None)
        if same is None:
            self._held.append(Held(line, now, [rank]))
        else:
            same.ranks.append(rank)

    def due(self) -> float | None:
        """Return when there will be something to print even if nothing more comes; None: never."""
        times = [self._held[0].since] if self._held else []
        return min([*times, *(since for _, since in self._partial.values())], default=None)

    def ready(self, now: float) -> bytes:
        """Return what to print now, in order: lines that all ranks have printed, or that have been held long enough."""
        for rank, (text, since) in list(self._partial.items()):
            if now - since >= HOLD_SECONDS:
                self._release(rank, text, now)
        count = len(list(itertools.takewhile(lambda one: self._is_ready(one, now), self._held)))
        count = max(count, len(self._held) - MOST)
        printed, self._held = self._held[:count], self._held[count:]
        return b"".join(map(shown, printed))

    def end(self) -> bytes:
        """Return all that is left."""
        for rank, (text, since) in list(self._partial.items()):
            self._release(rank, text, since)
        printed, self._held = self._held, []
        return b"".join(map(shown, printed))

    def _release(self, rank: int, text: bytes, now: float) -> None:
        """Let the beginning of a line be printed: it is a prompt or a progress bar, whose end may be far."""
        del self._partial[rank]
        self._begun.add(rank)
        self._held.append(Held(text, now, []))

    def _is_ready(self, one: Held, now: float) -> bool:
        return len(one.ranks) in (0, self._size) or now - one.since >= HOLD_SECONDS


def shown(one: Held) -> bytes:
    return f"[ranks {spelled(sorted(one.ranks))}] ".encode() + one.text if len(one.ranks) > 1 else one.text


def spelled(ranks: Sequence[int]) -> str:
    """Return ranks in order as people write them: 0-2, 5."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(ranks))


def runs(ranks: Sequence[int]) -> Iterable[tuple[int, int]]:
    for _, group in itertools.groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        yield members[0], members[-1]
