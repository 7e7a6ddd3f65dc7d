"""Meetings by calls between workers, of ranks that have no channel of their own yet.

MPI makes a communicator only once all ranks have come, and what one rank has begun cannot be taken back: the next
attempt of the others would be matched with it. So the ranks meet before. The worker of the first rank collects the
words, whatever its program does meanwhile, and decides: all ranks have come, or one that has come gives up before. All
ranks hear the same, those too that come later.
"""

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jdistgrad.data_parallel.collectives.roll_call import missing_ranks
from jdistgrad.data_parallel.collectives.world import TOLD_SECONDS, CollectiveEntry, WatchedBlock
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

    words: list[str]
    missing: list[int]
    seconds: float
    cause: str = ""


class Meetings:
    """The meetings of a worker: how many of each group it has come to, and those that it collects the words of."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turns = collections.Counter[tuple[Hashable, tuple[int, ...]]]()
        self.ends = collections.defaultdict[Name, concurrent.futures.Future[Outcome]](concurrent.futures.Future)
        self.words = collections.defaultdict[Name, dict[int, str]](dict)  # by the ranks' places


_making = threading.Lock()


def _meetings() -> Meetings:
    with _making:
        found: Meetings = current_worker().kept.setdefault("meetings", Meetings())
        return found


def meet(worker: Worker, ranks: Sequence[int], group: Hashable, word: str, timeout: float) -> list[str]:
    """Return the words of all ranks, once all have come.

    Arguments:
      ranks: as the world counts them. The worker of the first collects.
      group: tells meetings of the same ranks apart; the same on all of them.

    Raises:
      MissingRanksError: some ranks have not come in time, or a rank gave up before.
      WorkerLostError: a rank is lost, or in shutdown.
    """
    kept, key = _meetings(), (group, tuple(ranks))
    with kept.lock:
        name = Name(*key, kept.turns[key])
        kept.turns[key] += 1
    with WatchedBlock(worker, CollectiveEntry(word, key, name.turn), ranks, blocking=False) as together:
        outcome = _outcome(worker, name, word, timeout, together)
        if not outcome.missing:
            return outcome.words
        if outcome.cause:  # the others may have learnt before this rank of a worker that is lost
            poll(lambda: False, TOLD_SECONDS, together.check)
        early = f" A rank gave up early: {outcome.cause}." if outcome.cause else ""
        raise missing_ranks(word, outcome.missing, outcome.seconds, together.places(outcome.missing), early)


def _outcome(worker: Worker, name: Name, word: str, timeout: float, together: WatchedBlock) -> Outcome:
    def tell_first(function: Any, *args: Any) -> CallFuture[Any]:
        with within(None):
            return worker.rpc_async(name.ranks[0], function, (name, place, *args), {}, timeout + 2 * GRACE_SECONDS)

    place, start = name.ranks.index(worker.rank), time.monotonic()
    told = tell_first(come, word)
    try:
        if not poll(told.done, timeout, together.check):
            tell_first(give_up, timeout, "")
            poll(told.done, GRACE_SECONDS, together.check)
    except BaseException as error:  # Ctrl-C, or a rank that will never come
        tell_first(give_up, round(time.monotonic() - start, 1), type(error).__name__)
        raise
    return told.result() if told.done() else Outcome([], [0], timeout)  # the first rank's worker does not answer


def come(name: Name, place: int, word: str) -> "concurrent.futures.Future[Outcome]":
    """Collect a rank's word; return the outcome to come. Served by the first rank's worker."""
    kept = _meetings()
    with kept.lock:
        words, end = kept.words[name], kept.ends[name]
        words[place] = word
        have_come = len(words) == len(name.ranks)
        if have_come:
            del kept.words[name], kept.ends[name]
    if have_come:
        _decide(end, Outcome([words[k] for k in range(len(words))], [], 0.0))
    return end


def give_up(name: Name, place: int, seconds: float, cause: str) -> None:
    """End a meeting to which not all have come, since a rank waits no longer. Served by the first rank's worker."""
    kept = _meetings()
    with kept.lock:
        if name not in kept.ends:  # all have come
            return
        end, missing = kept.ends[name], set(range(len(name.ranks))) - set(kept.words[name]) - {place}
    _decide(end, Outcome([], sorted(missing), seconds, cause))


def _decide(end: "concurrent.futures.Future[Outcome]", outcome: Outcome) -> None:
    """End a meeting. Its first outcome is the only one."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        end.set_result(outcome)
