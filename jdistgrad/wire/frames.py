"""The bytes of a message: one frame, and the large buffers that follow it.

A frame is a fixed header, a table of piece lengths, and the pieces. The first piece is the attached bytes and the
pickle stream; the others are the stream's buffers. In place of a piece of at least ``BULK_FROM`` bytes, the frame holds
the piece's place in the sender's shared memory; if that is 0, the piece follows the frame, uncopied.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable
from typing import Any

from jdistgrad.errors import WireError
from jdistgrad.wire.arrays import ALIAS_FROM, ALIGNMENT, PADDINGS
from jdistgrad.wire.message import Message, MessageType, Parcel

BULK_FROM = ALIAS_FROM
HEADER = struct.Struct("<B3xII4xQQQ")  # kind, pieces, bytes attached, number, id, scope
START = HEADER.size
NO_SCOPE = (1 << 64) - 1
PLACE = struct.Struct("<Q8x")
LENGTH = 8  # bytes of one entry in the table of lengths
LONGEST_FRAME = (1 << 31) - 1  # bytes: MPI counts those of a frame in a C int
KINDS = {kind.value: kind for kind in MessageType}


@dataclasses.dataclass(slots=True)
class Frame:
    """A parsed frame: its message, and its pieces in order, None for a separate piece.

    ``number``: how many frames the sender had sent to this receiver before; the tag of the separate pieces.
    ``places``: of the separate pieces, by index.
    """

    message: Message
    number: int
    attached: int
    lengths: tuple[int, ...]
    pieces: list[Any]
    places: dict[int, int]

    def complete(self) -> Message:
        if self.pieces:
            first = memoryview(self.pieces[0])
            self.message.body = Parcel(first[self.attached :], self.pieces[1:], first[: self.attached])
        return self.message


@functools.cache
def _table(pieces: int) -> struct.Struct:
    return struct.Struct(f"<{pieces}Q{-(START + LENGTH * pieces) % ALIGNMENT}x")


def pack(
    message: Message, parcel: Parcel | None, number: int, put: Callable[[memoryview], int] = lambda piece: 0
) -> tuple[bytes, list[memoryview]]:
    """Return the frame of a message with this parcel for its body, and the pieces that must follow the frame.

    ``put``: copies a large piece to shared memory and returns the place; 0 if the piece must follow.

    Raises:
      WireError: the small pieces are too many for one frame.
    """
    pieces, attached = list[Any](), 0
    if parcel is not None:
        attached = len(parcel.attached)
        stream = memoryview(b"".join((parcel.attached, parcel.stream)) if attached else parcel.stream)
        pieces = [stream, *parcel.buffers]
    lengths = [piece.nbytes for piece in pieces]
    scope = NO_SCOPE if message.scope is None else message.scope
    parts: list[Any] = [
        HEADER.pack(message.kind, len(pieces), attached, number, message.id, scope),
        _table(len(pieces)).pack(*lengths),
    ]
    bulk, inside = [], 0
    for piece, length in zip(pieces, lengths, strict=True):
        if length < BULK_FROM:
            parts += piece, PADDINGS[length % ALIGNMENT]
            inside += length + ALIGNMENT
        else:
            place = put(piece)
            parts.append(PLACE.pack(place))
            if not place:
                bulk.append(piece)
    if inside + (LENGTH + PLACE.size) * len(pieces) + START + ALIGNMENT > LONGEST_FRAME:
        raise WireError(
            f"its arrays of less than 64 KiB have {inside / 2**30:.1f} GiB together, and a message takes less than "
            "2 GiB of them. Send several messages, or concatenate the arrays"
        )
    return b"".join(parts), bulk


def unpack(frame: Any, source: int) -> Frame:
    view = memoryview(frame)
    code, count, attached, number, identifier, scope = HEADER.unpack_from(view)
    message = Message(KINDS[code], source, identifier, None, None if scope == NO_SCOPE else scope)
    table = _table(count)
    lengths, start = table.unpack_from(view, START), START + table.size
    pieces, places = list[Any](), dict[int, int]()
    for k, length in enumerate(lengths):
        if length < BULK_FROM:
            pieces.append(view[start : start + length])
            start += length + -length % ALIGNMENT
        else:
            pieces.append(None)
            (places[k],) = PLACE.unpack_from(view, start)
            start += PLACE.size
    return Frame(message, number, attached, lengths, pieces, places)


WORD = struct.Struct("<B7xQQ")  # the frame of a meeting's word: kind, id, scope; the word follows
LONGEST_WORD = 1 << 12
