"""The board where the threads of a local world meet: each pins up a value and collects all of them."""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jdistgrad.errors import DisagreementError, MissingRanksError
from jdistgrad.wire.interrupts import SteadyCondition

LOOK_SECONDS = 0.05  # how often a waiting rank checks whether its world has failed

FEWER = (
    "If a rank has gone on after an error that kept it from making the same DataParallel objects and collectives, "
    "call init() again on every rank."
)


class Letter(NamedTuple):
    words: str
    octets: Any


class Letters:
    """The letters that threads of a process have sent to each other and not yet received."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int, int], collections.deque[Letter]] = collections.defaultdict(
            collections.deque
        )
        self._changed = SteadyCondition()

    def put(self, sender: int, receiver: int, tag: int, letter: Letter) -> None:
        with self._changed:
            self._waiting[sender, receiver, tag].append(letter)
            self._changed.notify_all()

    def next(self, sender: int, receiver: int, tag: int, timeout: float, check: Callable[[], None]) -> list[Letter]:
        """Take the next letter; return it, or nothing if none comes in time."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self._waiting[sender, receiver, tag]:
                check()
                if time.monotonic() > end:
                    return []
                self._changed.wait(min(LOOK_SECONDS, timeout))
            return [self._waiting[sender, receiver, tag].popleft()]


class Board:
    """Rounds of exchanges among ``size`` threads; each rank's k-th exchange belongs to the k-th round."""

    def __init__(self, size: int):
        self.size = size
        self._turns = [0] * size
        self._rounds: dict[int, dict[int, tuple[str, Any]]] = {}
        self._taken: dict[int, int] = {}
        self._changed = SteadyCondition()
        self._missing: list[int] | None = None
        self.letters = Letters()  # between two threads

    def exchange(self, rank: int, kind: str, value: Any, timeout: float, check: Callable[[], None]) -> list[Any]:
        """Return the values of all ranks, by rank, once all have come.

        Raises:
          MissingRanksError: some ranks have not come in time.
          DisagreementError: not all ranks are in the same kind of exchange.
        """
        return self.collect(self.pin(rank, kind, value), timeout, check, kind)

    def pin(self, rank: int, kind: str, value: Any) -> int:
        """Pin up a value. Return the number of its round, for ``collect``."""
        with self._changed:
            turn, self._turns[rank] = self._turns[rank], self._turns[rank] + 1
            pinned = self._rounds.setdefault(turn, {})
            pinned[rank] = (kind, value)
            if len(pinned) == self.size:
                self._changed.notify_all()
            return turn

    def collect(self, turn: int, timeout: float, check: Callable[[], None], what: str) -> list[Any]:
        """Return the values of all ranks in a round. ``what``: its name in an error."""
        with self._changed:
            pinned = self._rounds[turn]
            self._wait(pinned, what, timeout, check)
            self._take(turn)
        _require_one_kind(pinned)
        return [pinned[other][1] for other in range(self.size)]

    def _wait(self, pinned: dict[int, tuple[str, Any]], what: str, timeout: float, check: Callable[[], None]) -> None:
        """Wait until all have come. Raises once any rank has given up: those that come later would go on alone."""
        start = time.monotonic()
        while len(pinned) < self.size and self._missing is None:
            check()
            if time.monotonic() - start > timeout:
                self._missing = sorted(set(range(self.size)) - set(pinned))
                self._changed.notify_all()
            else:
                self._changed.wait(min(LOOK_SECONDS, timeout))
        if self._missing is not None:
            raise missing_ranks(what, self._missing, timeout, {})

    def _take(self, turn: int) -> None:
        self._taken[turn] = self._taken.get(turn, 0) + 1
        if self._taken[turn] == self.size:
            del self._taken[turn], self._rounds[turn]


def missing_ranks(
    what: str, missing: list[int], seconds: float, places: Mapping[int, str], told: str = ""
) -> MissingRanksError:
    """Make the error for ranks that did not come.

    Arguments:
      places: where some of the missing ranks are, if known.
      told: what else to say.
    """
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
    where = "; ".join(f"rank {rank} is at {places[rank]}" for rank in sorted(places))
    return MissingRanksError(
        f"{what}: {who} not come within {seconds:g} s{f' ({where})' if where else ''}. Every rank must take the same "
        "steps; ranks with fewer inputs need DataParallel.join(), slow ones a longer timeout. "
        f"{FEWER}{told}",
        missing=missing,
        seconds=seconds,
    )


def waits_no_longer(what: str, rank: int, seconds: float) -> MissingRanksError:
    """Make the error for a rank that all have come too late for. ``seconds``: how long this one would have waited."""
    return MissingRanksError(
        f"{what}: rank {rank} waits no longer, since not all ranks came in time. Every rank must take the same steps; "
        f"slow ones need a longer timeout, on every rank. {FEWER}",
        missing=[rank],
        seconds=seconds,
    )


def _require_one_kind(pinned: dict[int, tuple[str, Any]]) -> None:
    kinds = {rank: pinned[rank][0] for rank in sorted(pinned)}
    other = next((rank for rank, kind in kinds.items() if kind != kinds[0]), None)
    if other is not None:
        raise DisagreementError(
            f"the ranks are not in the same operation: rank 0 is in {kinds[0]}, rank {other} in {kinds[other]}. "
            "Every rank must call the same operations in the same order.",
            rank=other,
        )
