"""Meetings by calls between workers, of ranks that have no channel of their own yet.

MPI makes a communicator only once all ranks have come, and what one rank has begun cannot be taken back: the next
attempt of the others would be matched with it. So the ranks meet before. The worker of the first rank collects the
words, whatever its program does meanwhile, and decides: all ranks have come, or one that has come gives up before. All
ranks hear the same, those too that come later.
"""

import collections
import functools
import threading
import time
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jdistgrad.data_parallel.collectives.roll_call import Meeting, missing_ranks
from jdistgrad.data_parallel.collectives.world import TOLD_SECONDS, CollectiveEntry, WatchedBlock
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.current import within
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.polling import poll

GRACE_SECONDS = 3.0  # a rank that gives up waits so much longer for the decision


class Name(NamedTuple):
    """The name of a meeting, the same on all of its ranks. ``turn``: how many of the group's were before it."""

    group: Hashable
    ranks: tuple[int, ...]
    turn: int


class Outcome(NamedTuple):
    """How a meeting has ended: with the words of all ranks, or without those that are missing after some seconds.

    ``cause``: why a rank gave up before its time; empty if the meeting has ended otherwise.
    """

    words: list[Any]
    missing: list[int]
    seconds: float
    cause: str = ""


class Meetings:
    """The meetings of a worker: how many it has come to, the words it collects, the outcomes it has heard.

    The first outcome of a meeting is the only one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = collections.Counter[tuple[Hashable, tuple[int, ...]]]()
        self._words: dict[Name, dict[int, Any]] = {}  # by the ranks' places, until all have come
        self._given_up: set[Name] = set()
        self.heard: dict[Name, Outcome] = {}

    def next(self, group: Hashable, ranks: tuple[int, ...]) -> Name:
        with self._lock:
            self._turns[group, ranks] += 1
            return Name(group, ranks, self._turns[group, ranks] - 1)

    def come(self, name: Name, place: int, word: Any) -> Outcome | None:
        """Add a rank's word. Return the outcome if this is the last, unless there is one already."""
        with self._lock:
            words = self._words.setdefault(name, {})
            words[place] = word
            if len(words) < len(name.ranks):
                return None
            del self._words[name]
            if name in self._given_up:
                self._given_up.remove(name)
                return None
            return Outcome([words[k] for k in range(len(words))], [], 0.0)

    def give_up(self, name: Name, seconds: float, cause: str) -> Outcome | None:
        """Return the outcome, unless there is one already. Whoever gives up has come."""
        with self._lock:
            if name not in self._words or name in self._given_up:
                return None
            self._given_up.add(name)
            return Outcome([], sorted(set(range(len(name.ranks))) - set(self._words[name])), seconds, cause)


_kept: "weakref.WeakKeyDictionary[Worker, Meetings]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _meetings() -> Meetings:
    with _lock:
        return _kept.setdefault(current_worker(), Meetings())


class ByCalls:
    """A group of workers that meets by calls, as ``Agreeing`` needs it.

    Arguments:
      ranks: the world ranks of the group. The worker of the first collects.
      group: tells meetings of the same ranks apart; the same on all of them.
      timeout: seconds to wait for a meeting that none is given for.
    """

    refusal: CollectiveError | None = None

    def __init__(self, worker: Worker, ranks: Sequence[int], group: Hashable, timeout: float):
        self._worker, self._ranks, self._group, self._timeout = worker, tuple(ranks), group, timeout
        self.rank = self._ranks.index(worker.rank)

    def announce(self, word: Any, what: str) -> Meeting:
        name = _meetings().next(self._group, self._ranks)
        told = self._tell_first(come, name, self.rank, word)
        return Meeting(functools.partial(self._words, name, told, what))

    def gather_objects(self, value: Any) -> list[Any]:
        return self.announce(value, "a gather of objects")(self._timeout)

    def _tell_first(self, function: Any, *args: Any) -> CallFuture[Any]:
        with within(None):
            return self._worker.rpc_async(self._ranks[0], function, args, {}, GRACE_SECONDS)

    def _words(self, name: Name, told: CallFuture[Any], what: str, timeout: float) -> list[bytes]:
        """Return the words of all ranks. ``told``: the call by which the first rank's worker learns of this one's."""
        entry = CollectiveEntry(what, name[:2], name.turn)
        with WatchedBlock(self._worker, entry, self._ranks, blocking=False) as together:
            outcome = self._outcome(name, told, timeout, together)
            if not outcome.missing:
                return outcome.words
            if outcome.cause:  # the others may have learnt before this rank of a worker that is lost
                poll(lambda: False, TOLD_SECONDS, together.check)
            places = together.places(outcome.missing)
            early = f" A rank gave up early: {outcome.cause}." if outcome.cause else ""
            raise missing_ranks(what, outcome.missing, outcome.seconds, places, early)

    def _outcome(self, name: Name, told: CallFuture[Any], timeout: float, together: WatchedBlock) -> Outcome:
        heard, start = _meetings().heard, time.monotonic()
        try:
            if not poll(lambda: name in heard, timeout, together.check):
                poll(told.done, GRACE_SECONDS, together.check)  # calls can overtake each other
                self._tell_first(give_up, name, timeout, "")
                poll(lambda: name in heard, GRACE_SECONDS, together.check)
        except BaseException as error:  # Ctrl-C, or a rank that will never come
            self._tell_first(give_up, name, round(time.monotonic() - start, 1), type(error).__name__)
            raise
        return heard.pop(name, Outcome([], [0], timeout))  # if the first rank's worker does not answer, it is missing


def come(name: Name, place: int, word: Any) -> None:
    """Collect a rank's word. Served by the first rank's worker."""
    _tell_all(name, _meetings().come(name, place, word))


def give_up(name: Name, seconds: float, cause: str) -> None:
    """End a meeting to which not all have come, since a rank waits no longer. Served by the first rank's worker."""
    _tell_all(name, _meetings().give_up(name, seconds, cause))


def _tell_all(name: Name, outcome: Outcome | None) -> None:
    if outcome is not None:
        with within(None):
            current_worker().calls.start_all(name.ranks, (hear, (name, outcome), {}), GRACE_SECONDS)


def hear(name: Name, outcome: Outcome) -> None:
    """Take note of the outcome of a meeting. Served by every worker."""
    _meetings().heard[name] = outcome
