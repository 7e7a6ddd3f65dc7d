"""What comes for the groups of a worker: words of meetings, letters, and that a worker waits no longer.

It is kept until this worker asks for it, which may be before it has made the group at all.
"""

import dataclasses
import itertools
import pickle
from collections.abc import Hashable
from typing import Any, NamedTuple

from jdistgrad.wire.arrays import ALIAS_FROM
from jdistgrad.wire.message import Message, Parcel
from jdistgrad.wire.transport import Ending

GAVE_UP = 1 << 63  # the key under which a worker says that it waits no longer
LETTERS = 1 << 62  # added to the keys of letters


class GaveUp(NamedTuple):
    """What a worker says that waits no longer: for which meeting, without which ranks of the group, after how long.

    ``cause``: what has ended the wait before its time; "" if nothing has.
    """

    rank: int
    turn: int
    missing: list[int]
    seconds: float
    cause: str


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
        """Let nobody wait for a meeting from this one on."""
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
