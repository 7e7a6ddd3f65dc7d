"""Meetings: all-gathers of small values among a group of workers; and letters: messages between two of them.

Both are messages of the transport, so a thread that waits for them receives messages itself. They are kept until this
worker asks for them, and may arrive before it has made the group.
"""

import dataclasses
import hashlib
import itertools
import pickle
import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jdistgrad.errors import CollectiveError, MissingRanksError, WorkerLostError, WorldClosedError
from jdistgrad.rpc import trees
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.wire.arrays import ALIAS_FROM
from jdistgrad.wire.frames import LONGEST_WORD
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Message, MessageType, Parcel
from jdistgrad.wire.transport import Ending

AT_ONCE = 200e-6  # for how long the watchdog need not know of a wait
GAVE_UP = 1 << 63  # the key under which a worker says that it waits no longer
LETTERS = 1 << 62  # added to the keys of letters


class GaveUp(NamedTuple):
    """The message of a worker that has ended its wait: for which meeting, without which ranks, after how many seconds.

    ``cause``: what has ended the wait before its time; "" if nothing has.
    """

    rank: int
    turn: int
    missing: list[int]
    seconds: float
    cause: str


class Unpicklable(NamedTuple):
    """The placeholder of a word that cannot be pickled, with the reason."""

    why: str


@dataclasses.dataclass(slots=True, eq=False)
class Gathering(Ending):
    """Messages of a group with one key: ``done`` when all that this worker waits for have come, or none will.

    Attributes:
      came: what has come, by the sender's world rank.
    """

    came: dict[int, Any] = dataclasses.field(default_factory=dict)
    _expected: int = -1  # how many are to come, once this worker waits for them

    def add(self, source: int, body: Any) -> None:
        self.came[source] = body
        if len(self.came) == self._expected:
            self.end()

    def expect(self, count: int) -> None:
        self._expected = count
        if len(self.came) == count:
            self.end()


class Arrivals:
    """What has come for one group, by key, and who waits no longer since the earliest meeting."""

    def __init__(self) -> None:
        self.by_key: dict[int, Gathering] = {}
        self.gave_up: GaveUp | None = None

    def of(self, key: int) -> Gathering:
        return self.by_key.get(key) or self.by_key.setdefault(key, Gathering())

    def expect(self, key: int, count: int) -> Gathering:
        """Return the messages with a key, of which this worker waits for so many."""
        found = self.of(key)
        found.expect(count)
        if self.gave_up is not None and self.gave_up.turn <= key < LETTERS:
            found.end()
        return found

    def end(self, word: GaveUp) -> None:
        """End the waits for this meeting and later ones."""
        if self.gave_up is None or word.turn < self.gave_up.turn:
            self.gave_up = word
        for key, one in list(self.by_key.items()):
            if word.turn <= key < LETTERS:
                one.end()


class Groups:
    """The groups of a worker: what has come for each, and how many it has made of each name.

    Attributes:
      made: counts the groups made of each parent and ranks.
      sent: how many words this worker has sent to a group, and letters of each kind: it need not stay until they come.
    """

    def __init__(self) -> None:
        self.sent: dict[Hashable, int] = {}
        self._of: dict[int, Arrivals] = {}
        self.made: dict[Any, itertools.count[int]] = {}

    def arrivals(self, group: int) -> Arrivals:
        return self._of.get(group) or self._of.setdefault(group, Arrivals())

    def arrived(self, message: Message) -> None:
        assert message.scope is not None
        arrivals = self.arrivals(message.scope)
        if message.id == GAVE_UP:
            arrivals.end(unpacked(message.body))
        else:
            arrivals.of(message.id).add(message.source, message.body)

    def forget(self, group: int) -> None:
        self._of.pop(group, None)
        self.sent.pop(group, None)


def packed(value: Any) -> Parcel:
    """Pickle a value. Copies of its large arrays follow the pickle, which is several times as fast."""
    large: list[memoryview] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < ALIAS_FROM:
            return True
        large.append(memoryview(bytearray(buffer.raw())))
        return False

    return Parcel(pickle.dumps(value, protocol=5, buffer_callback=stays), large)


def unpacked(body: Any) -> Any:
    """Return what a message has brought; in one process, the very object that was sent."""
    return pickle.loads(body.stream, buffers=body.buffers) if isinstance(body, Parcel) else body


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
        try:
            if not self.at_once(AT_ONCE):
                self._wait(timeout - AT_ONCE)
        except KeyboardInterrupt:
            self._members.leave("KeyboardInterrupt")
            raise
        if self._has_failed():
            raise self._failure(None)
        members, came = self._members, self._gathering.came
        self._arrivals.by_key.pop(self._turn, None)
        words = [self._word if place == members.rank else unpacked(came[r]) for place, r in enumerate(members.ranks)]
        for place, word in enumerate(words):
            if type(word) is Unpicklable:
                raise CollectiveError(f"{self._what}: that of rank {place} cannot be pickled: {word.why}")
        return words

    def _wait(self, timeout: float) -> None:
        members = self._members
        entry = CollectiveEntry(self._what, members.name, self._turn, by_calls=members.by_calls)
        with WatchedBlock(members.worker, entry, members.ranks) as block:
            if not block.wait(self._gathering, timeout):
                members.give_up(self._turn, self._missing(), round(timeout, 3))
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
        if members.rank in word.missing or word.cause:
            return waits_no_longer(self._what, word.rank, word.seconds, word.cause)
        places = {}
        if block is not None:
            found = block.places([members.ranks[place] for place in word.missing])
            places = {place: found[members.ranks[place]] for place in word.missing if members.ranks[place] in found}
        return missing_ranks(self._what, word.missing, word.seconds, places)


class Members:
    """The workers of a group, as one of them sees it: each one's k-th meeting is the others' k-th.

    Attributes:
      ranks: those of the workers, in the group's order; ``rank``: this worker's place among them.
      name: the same on all of them, and of no other group.
      by_calls: whether its meetings are of workers that save together: see ``CollectiveEntry``. Such a group has
        a parent of its own.
    """

    def __init__(self, worker: Mailbox, ranks: Sequence[int], parent: Any = None, *, by_calls: bool = False):
        self.ranks, self.size, self.by_calls = tuple(map(int, ranks)), len(ranks), by_calls
        if worker.rank not in self.ranks:
            raise CollectiveError(
                f"collectives of the workers {list(self.ranks)}, made by {worker.info}, who is not one"
            )
        self.rank = self.ranks.index(worker.rank)
        self._worker, self._info = weakref.ref(worker), worker.info  # programs keep groups, which must not keep workers
        self._groups = worker.part(Groups)
        counts = self._groups.made
        number = 0 if by_calls else next(counts.setdefault((parent, self.ranks), itertools.count()))
        text = repr((parent, self.ranks, number))
        self.name = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        self._arrivals, self._turn = self._groups.arrivals(self.name), -1
        self.others = [rank for rank in self.ranks if rank != worker.rank]
        self._received: dict[tuple[int, int], int] = {}  # letters, by sender and tag

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

    def again(self) -> "Members":
        """Return another group of the same workers. All of them must call it."""
        return Members(self.worker, self.ranks, self.name)

    def begin(self, word: Any, what: str) -> Meeting:
        """Come to the next meeting, with a word for the others."""
        worker = self.worker
        self._turn = turn = self._turn + 1
        self._groups.sent[self.name] = turn + 1
        if type(word) is bytes and len(word) < LONGEST_WORD and not worker.hands_over:
            with put_off_interrupt():
                worker.transport.send_words(self.others, turn, self.name, word)
            return Meeting(self, self._arrivals, turn, word, what)
        try:
            body = word if worker.hands_over or not self.others else packed(word)
        except Exception as error:  # the others wait for something in any case
            word = Unpicklable(in_short(error))
            body = packed(word)
        self._tell_others(worker, turn, body)
        return Meeting(self, self._arrivals, turn, word, what)

    def _tell_others(self, worker: Mailbox, key: int, body: Any) -> None:
        with put_off_interrupt():
            for rank in self.others:
                try:
                    worker.transport.send(rank, Message(MessageType.MEET, worker.rank, key, body, self.name))
                except WorkerLostError:
                    continue

    def give_up(self, turn: int, missing: list[int], seconds: float, cause: str = "") -> None:
        """Tell the others that this worker waits no longer: neither this meeting nor a later one takes place."""
        worker, word = self.worker, GaveUp(self.rank, turn, missing, seconds, cause)
        self._arrivals.end(word)
        self._tell_others(worker, GAVE_UP, word if worker.hands_over else packed(word))

    def leave(self, cause: str) -> None:
        """Tell the others that this worker's operation has been ended, by Ctrl-C for example."""
        self.give_up(self._turn, [], 0.0, cause)

    def close(self) -> None:
        """Forget what has come."""
        self._groups.forget(self.name)

    # Letters. The k-th that a worker sends to another with a tag is the k-th that the other takes.

    def send(self, to: int, tag: int, letter: Any) -> None:
        """Send a letter to a rank of the group, without waiting."""
        worker, kind = self.worker, (self.name, self.rank, to, tag)
        number = self._groups.sent.get(kind, 0)
        body = trees.steady(letter) if worker.hands_over else packed(letter)
        message = Message(MessageType.MEET, worker.rank, _letter(self.rank, tag, number), body, self.name)
        with put_off_interrupt():
            worker.transport.send(self.ranks[to], message)
            self._groups.sent[kind] = number + 1

    def receive(self, source: int, tag: int, what: str, timeout: float, remedy: str = "") -> Any:
        """Return the next letter from a rank of the group. After an error the next call waits for the same letter.

        Arguments:
          remedy: what to do where none comes, for the error.

        Raises:
          MissingRanksError: none has come in time.
          WorkerLostError: none will come.
        """
        worker, ranks = self.worker, (self.ranks[self.rank], self.ranks[source])
        number = self._received.get((source, tag), 0)
        key = _letter(source, tag, number)
        awaited = self._arrivals.expect(key, 1)
        entry = CollectiveEntry(what, (self.name, source, self.rank, tag), number)
        with WatchedBlock(worker, entry, ranks) as block:
            if not block.wait(awaited, timeout):
                place = block.places(ranks[1:]).get(ranks[1])
                where = f" (it is at {place})" if place else ""
                text = f"{what}: nothing has come within {timeout:g} s{where}. {remedy}"
                raise MissingRanksError(text, missing=[source], seconds=timeout)
        self._received[source, tag] = number + 1
        self._arrivals.by_key.pop(key, None)
        return unpacked(awaited.came[ranks[1]])


def _letter(sender: int, tag: int, number: int) -> int:
    """Return the key of a letter."""
    return LETTERS | sender << 42 | tag << 32 | number


# The errors of waits.

FEWER = (
    "If a rank has gone on after an error that kept it from making the same DataParallel objects and collectives, "
    "call init() again on every rank."
)


def missing_ranks(what: str, missing: list[int], seconds: float, places: Mapping[int, str]) -> MissingRanksError:
    """Make the error for ranks that did not come. ``places``: where some of them are, if known."""
    who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
    where = "; ".join(f"rank {rank} is at {places[rank]}" for rank in sorted(places))
    return MissingRanksError(
        f"{what}: {who} not come within {seconds:g} s{f' ({where})' if where else ''}. Every rank must take the same "
        "steps; ranks with fewer inputs need DataParallel.join(), slow ones a longer timeout. "
        f"{FEWER}",
        missing=missing,
        seconds=seconds,
    )


def waits_no_longer(what: str, rank: int, seconds: float, cause: str = "") -> MissingRanksError:
    """Make the error for one that comes after a rank has given up. ``seconds``: how long that rank has waited."""
    why = f"{cause} has ended its operation" if cause else "not all ranks came in time"
    return MissingRanksError(
        f"{what}: rank {rank} waits no longer, since {why}. Every rank must take the same steps; "
        f"slow ones need a longer timeout, on every rank. {FEWER}",
        missing=[rank],
        seconds=seconds,
    )
