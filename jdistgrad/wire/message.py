"""What workers say to each other."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


class Kind(enum.IntEnum):
    """What a message is about. WORK kinds carry users' work, the others keep the world alive."""

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
    CAST = 12
    RELEASE = 13


CALLS = frozenset({Kind.CALL, Kind.REMOTE, Kind.CAST})
ANSWERS = frozenset({Kind.RESULT, Kind.FAILURE})
WORK = CALLS | ANSWERS | {Kind.DROP, Kind.RELEASE}
ENCODED = CALLS | ANSWERS  # their bodies are what users gave; those of others are plain: numbers, strings and the like


@dataclasses.dataclass(slots=True)
class Parcel:
    """An encoded value: a pickle stream and the buffers that travel beside it.

    ``attached`` travels too; what it means is its maker's business. ``undo`` is called if the parcel cannot be sent.
    """

    stream: Any
    buffers: list[Any]
    attached: Any = b""
    undo: Callable[[], None] | None = None


@dataclasses.dataclass(slots=True)
class Message:
    """One message. ``body`` is the value itself, the ``Parcel`` a transport made of it, or what the wire did to it."""

    kind: Kind
    source: int
    id: int
    body: Any = None
