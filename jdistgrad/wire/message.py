"""The messages that workers send each other, and the ids in them, unique in a world."""

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

COUNTER_BITS = 48
MAX_WORKERS = 1 << 16


def ids_of(rank: int) -> Iterator[int]:
    """Return one worker's identifiers, in order. Safe from any thread."""
    assert 0 <= rank < MAX_WORKERS
    return itertools.count(rank << COUNTER_BITS)


def worker_of(identifier: int) -> int:
    """Return the rank of the worker that made an identifier."""
    return identifier >> COUNTER_BITS


def as_token(*identifiers: int) -> np.ndarray:
    """Return identifiers, plus 1 each, as an array of 32-bit halves: JAX has no 64-bit integers by default."""
    numbers = [one + 1 for one in identifiers]
    return np.array([part for one in numbers for part in (one >> 32, one & 0xFFFFFFFF)], np.uint32)


def from_token(token: Any) -> tuple[int, ...]:
    parts = np.asarray(token).tolist()
    return tuple((high << 32 | low) - 1 for high, low in zip(parts[::2], parts[1::2], strict=True))


def stands_for_nothing(token: Any) -> bool:
    """Return whether a token is zeros, the placeholder in loops for a value that is not yet computed."""
    return not np.any(token)


def spell(identifier: int) -> str:
    """Return an identifier as text: rank and counter."""
    return f"{worker_of(identifier)}:{identifier & ((1 << COUNTER_BITS) - 1)}"


class MessageType(enum.IntEnum):
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
    BREAK = 14
    LOST = 15
    MEET = 16
    WORD = 17


CALLS = frozenset({MessageType.CALL, MessageType.REMOTE})
ANSWERS = frozenset({MessageType.RESULT, MessageType.FAILURE})
ABOUT_LOSSES = frozenset({MessageType.LOST, MessageType.BREAK})
WORK = CALLS | ANSWERS | ABOUT_LOSSES | {MessageType.PUSH, MessageType.DROP, MessageType.RELEASE}
# Their bodies hold users' values; those of others numbers, strings ...
ENCODED = CALLS | ANSWERS | {MessageType.PUSH, MessageType.MEET}


@dataclasses.dataclass(slots=True)
class Parcel:
    """An encoded value: a pickle stream (bytes) and its out-of-band buffers, which have ``nbytes``.

    ``attached``: other bytes that travel with it. ``undo`` is called if the parcel cannot be sent.
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

    kind: MessageType
    source: int
    id: int
    body: Any = None
    scope: int | None = None
