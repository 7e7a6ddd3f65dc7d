"""The messages that workers send each other."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class Kind(enum.IntEnum):
    """The kind of a message. WORK kinds carry users' work; the others manage the world."""

    CALL = 1
    REMOTE = 2
    RESULT = 3
    FAILURE = 4
    DROP = 5
    PING = 6
    PONG = 7
    SURVEY = 8
    REPORT = 9
    CLOSE = 10
    LEAVE = 11
    PUSH = 12
    RELEASE = 13
    SETTLE = 14
    FORGET = 15
    PARTAKE = 16
    BREAK = 17
    LOST = 18
    MEET = 19
    WORD = 20


CALLS = frozenset({Kind.CALL, Kind.REMOTE})
ANSWERS = frozenset({Kind.RESULT, Kind.FAILURE})
ABOUT_LOSSES = frozenset({Kind.LOST, Kind.SETTLE, Kind.FORGET, Kind.PARTAKE, Kind.BREAK})
WORK = CALLS | ANSWERS | ABOUT_LOSSES | {Kind.PUSH, Kind.DROP, Kind.RELEASE}
# Their bodies hold users' values; those of others numbers, strings ...
ENCODED = CALLS | ANSWERS | {Kind.PUSH, Kind.MEET}


@dataclasses.dataclass(slots=True)
class Parcel:
    """An encoded value: a pickle stream (bytes), and the buffers that travel beside it, which have ``nbytes``.

    ``attached`` travels too; the transport does not interpret it. ``undo`` is called if the parcel cannot be sent.
    """

    stream: Any
    buffers: list[Any]
    attached: Any = b""
    undo: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        return len(self.stream) + sum([int(one.nbytes) for one in self.buffers])


@dataclasses.dataclass(slots=True)
class Message:
    """A message. ``body`` is the value itself, or the ``Parcel`` that encodes it.

    ``scope``: of a call, the id of the scope it was made in; of a word or letter, the name of the group.
    """

    kind: Kind
    source: int
    id: int
    body: Any = None
    scope: int | None = None
