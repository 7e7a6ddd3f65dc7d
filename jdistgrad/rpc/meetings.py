"""Meetings of some workers, to each of which all bring a word; and letters from one of them to another.

Words and letters are messages, so they ring the receiver's bell, and whoever waits for them looks for messages itself.
"""

import hashlib
import itertools
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from jdistgrad.errors import CollectiveError, MissingRanksError, WorkerLostError, WorldClosedError
from jdistgrad.rpc import trees
from jdistgrad.rpc.arrivals import GAVE_UP, LETTERS, Arrivals, GaveUp, Groups, packed, unpacked
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.wire.frames import LONGEST_WORD
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Kind, Message

AT_ONCE = 200e-6  # for how long the watchdog need not know of a wait


class Meeting:
    """A meeting that this worker has come to."""

    def __init__(self, members: "Members", arrivals: Arrivals, turn: int, word: Any, what: str):
        self._members, self._arrivals, self._turn, self._word, self._what = members, arrivals, turn, word, what
        self._gathering = arrivals.expect(turn, len(members.others))

    def at_once(self, seconds: float) -> bool:
        """Return whether the meeting has ended within a moment, of which the watchdog need not know."""
        gathering = self._gathering
        if not gathering.done:
            with put_off_interrupt():
                self._members.worker.transport.wait(gathering, time.monotonic() + seconds)
        return gathering.done

    def wait(self, timeout: float) -> list[Any]:
        """Return the words of all, in the order of the group.

        Raises:
          MissingRanksError: some have not come in time; or one that was in time has given up before.
          CollectiveError: a word cannot be pickled.
          WorkerLostError: one will not come.
        """
        if not self.at_once(AT_ONCE):
            self._wait(timeout - AT_ONCE)
        if self._has_failed():
            raise self._failure(None)
        members, came = self._members, self._gathering.came
        self._arrivals.by_key.pop(self._turn, None)
        words = [unpacked(came[rank]) if rank in came else self._word for rank in members.ranks]
        for word in words:
            if isinstance(word, CollectiveError):
                raise word
        return words

    def _wait(self, timeout: float) -> None:
        members, start = self._members, time.monotonic()
        entry = CollectiveEntry(self._what, members.name, self._turn)
        with WatchedBlock(members.worker, entry, members.ranks) as block:
            try:
                if not block.wait(self._gathering, timeout):
                    members.give_up(self._turn, self._missing(), round(timeout, 3))
            except KeyboardInterrupt:
                seconds = round(time.monotonic() - start, 1)
                members.give_up(self._turn, self._missing(), seconds, "KeyboardInterrupt")
                raise
            if self._has_failed():
                raise self._failure(block)

    def _has_failed(self) -> bool:
        word = self._arrivals.gave_up
        return word is not None and word.turn <= self._turn

    def _missing(self) -> list[int]:
        came, members = self._gathering.came, self._members
        return [place for place, rank in enumerate(members.ranks) if rank in members.others and rank not in came]

    def _failure(self, block: "WatchedBlock | None") -> MissingRanksError:
        word, members = self._arrivals.gave_up, self._members
        assert word is not None
        if members.rank in word.missing:
            return waits_no_longer(self._what, word.rank, word.seconds)
        places = {}
        if block is not None:
            found = block.places([members.ranks[place] for place in word.missing])
            places = {place: found[members.ranks[place]] for place in word.missing if members.ranks[place] in found}
        early = f" A rank gave up early: {word.cause}." if word.cause else ""
        return missing_ranks(self._what, word.missing, word.seconds, places, early)


class Members:
    """The workers of a group, as one of them sees it: each one's k-th meeting is the others' k-th.

    Attributes:
      ranks: those of the workers, in the group's order; ``rank``: this worker's place among them.
      name: the same on all of them, and of no other group.
    """

    def __init__(self, worker: Mailbox, ranks: Sequence[int], parent: Any = None):
        self.ranks, self.size, self.rank = tuple(ranks), len(ranks), tuple(ranks).index(worker.rank)
        self._worker, self._info = weakref.ref(worker), worker.info  # programs keep groups, which must not keep workers
        meetings = worker.part(Groups)
        text = repr((parent, self.ranks, meetings.next_of((parent, self.ranks))))
        self.name = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        self._arrivals, self._turns = meetings.arrivals(self.name), itertools.count()
        self.others = [rank for rank in self.ranks if rank != worker.rank]
        self._letters: dict[tuple[int, int, bool], itertools.count[int]] = {}

    @property
    def worker(self) -> Mailbox:
        """This worker. Raises its world's error, or WorldClosedError, once that has failed or closed."""
        worker = self._worker()
        if worker is not None and worker.failure is not None:
            raise worker.failure.with_traceback(None)
        if worker is None or worker.closed:
            raise WorldClosedError(
                f"collectives of {self._info}: their world has been shut down. Make new ones in this one.",
                worker=self._info,
            )
        return worker

    def again(self, ranks: Sequence[int] | None = None) -> "Members":
        """Return another group of the same workers, or of some. All of these must call it."""
        return Members(self.worker, self.ranks if ranks is None else ranks, self.name)

    def begin(self, word: Any, what: str) -> Meeting:
        """Come to the next meeting, with a word for the others."""
        turn, worker = next(self._turns), self.worker
        if type(word) is bytes and len(word) < LONGEST_WORD and not worker.hands_over:
            with put_off_interrupt():
                worker.transport.send_words(self.others, turn, self.name, word)
            return Meeting(self, self._arrivals, turn, word, what)
        try:
            body = word if worker.hands_over else packed(word)
        except Exception as error:  # the others wait for something in any case
            word = CollectiveError(f"{what}: that of rank {self.rank} cannot be pickled: {in_short(error)}")
            body = packed(word)
        self._tell_others(worker, turn, body)
        return Meeting(self, self._arrivals, turn, word, what)

    def _tell_others(self, worker: Mailbox, key: int, body: Any) -> None:
        with put_off_interrupt():
            for rank in self.others:
                try:
                    worker.transport.send(rank, Message(Kind.MEET, worker.rank, key, body, self.name))
                except WorkerLostError:
                    continue

    def give_up(self, turn: int, missing: list[int], seconds: float, cause: str = "") -> None:
        """Tell the others that this worker waits no longer: neither this meeting nor a later one takes place."""
        worker, word = self.worker, GaveUp(self.rank, turn, missing, seconds, cause)
        self._arrivals.end(word)
        self._tell_others(worker, GAVE_UP, word if worker.hands_over else packed(word))

    # Letters. The k-th that a worker sends to another with a tag is the k-th that the other takes.

    def send(self, to: int, tag: int, letter: Any) -> None:
        """Send a letter to a rank of the group, without waiting."""
        worker, key = self.worker, self._letter(self.rank, to, tag, incoming=False)
        body = trees.steady(letter) if worker.hands_over else packed(letter)
        with put_off_interrupt():
            worker.transport.send(self.ranks[to], Message(Kind.MEET, worker.rank, key, body, self.name))

    def receive(self, source: int, tag: int, what: str, timeout: float, remedy: str = "") -> Any:
        """Return the next letter from a rank of the group.

        Arguments:
          remedy: what to do where none comes, for the error.

        Raises:
          MissingRanksError: none has come in time.
          WorkerLostError: none will come.
        """
        worker, ranks = self.worker, (self.ranks[self.rank], self.ranks[source])
        key = self._letter(source, source, tag, incoming=True)
        awaited = self._arrivals.expect(key, 1)
        entry = CollectiveEntry(what, (self.name, ranks[::-1], tag), 0)
        with WatchedBlock(worker, entry, ranks) as block:
            if not block.wait(awaited, timeout):
                place = block.places(ranks[1:]).get(ranks[1])
                where = f" (it is at {place})" if place else ""
                text = f"{what}: nothing has come within {timeout:g} s{where}. {remedy}"
                raise MissingRanksError(text, missing=[source], seconds=timeout)
        self._arrivals.by_key.pop(key, None)
        return unpacked(awaited.came[ranks[1]])

    def _letter(self, sender: int, other: int, tag: int, *, incoming: bool) -> int:
        """Return the key of the next letter from a rank, exchanged with the other one."""
        number = next(self._letters.setdefault((other, tag, incoming), itertools.count()))
        return LETTERS | sender << 42 | tag << 32 | number


# The errors of waits.

FEWER = (
    "If a rank has gone on after an error that kept it from making the same DataParallel objects and collectives, "
    "call init() again on every rank."
)


def missing_ranks(
    what: str, missing: list[int], seconds: float, places: Mapping[int, str], early: str = ""
) -> MissingRanksError:
    """Make the error for ranks that did not come. ``places``: where some of them are, if known."""
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
    where = "; ".join(f"rank {rank} is at {places[rank]}" for rank in sorted(places))
    return MissingRanksError(
        f"{what}: {who} not come within {seconds:g} s{f' ({where})' if where else ''}. Every rank must take the same "
        "steps; ranks with fewer inputs need DataParallel.join(), slow ones a longer timeout. "
        f"{FEWER}{early}",
        missing=missing,
        seconds=seconds,
    )


def waits_no_longer(what: str, rank: int, seconds: float) -> MissingRanksError:
    """Make the error for one that comes after a rank has given up. ``seconds``: how long that rank has waited."""
    return MissingRanksError(
        f"{what}: rank {rank} waits no longer, since not all ranks came in time. Every rank must take the same steps; "
        f"slow ones need a longer timeout, on every rank. {FEWER}",
        missing=[rank],
        seconds=seconds,
    )
