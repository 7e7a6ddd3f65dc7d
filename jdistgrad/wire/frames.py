"""The bytes of a message: one frame, and the large buffers that follow it.

A frame is a fixed header, a table of piece lengths, and the pieces. The first piece is the attached bytes and the
pickle stream; the others are the stream's buffers. Pieces of at least ``BULK_FROM`` bytes stay out of the frame. In
their stead, the frame holds the place where the receiver finds the piece in the sender's shared memory; if that is 0,
the piece follows the frame, uncopied.
"""

import dataclasses
import functools
import struct
from collections.abc import Callable
from typing import Any

from jdistgrad.errors import WireError
from jdistgrad.wire.arrays import ALIAS_FROM, ALIGNMENT, padded, padding
from jdistgrad.wire.message import Kind, Message, Parcel

BULK_FROM = ALIAS_FROM
HEADER = struct.Struct("<B7xIIQQ")  # kind, pieces, bytes attached, number, id
START = HEADER.size
PLACE = struct.Struct("<Q8x")
LENGTH = 8  # bytes of one entry in the table of lengths
LONGEST_FRAME = (1 << 31) - 1  # bytes: MPI counts those of a frame in a C int
KINDS = {kind.value: kind for kind in Kind}


@dataclasses.dataclass(slots=True)
class Frame:
    """A parsed frame: its pieces in order, None for a separate piece.

    ``number``: how many frames the sender had sent to this receiver before it; the tag of its separate pieces.
    ``places``: of the separate pieces, in order.
    """

    kind: Kind
    id: int
    number: int
    attached: int
    lengths: tuple[int, ...]
    pieces: list[Any]
    places: list[int]

    def message(self, source: int) -> Message:
        if not self.pieces:
            return Message(self.kind, source, self.id)
        first = memoryview(self.pieces[0])
        parcel = Parcel(first[self.attached :], self.pieces[1:], first[: self.attached])
        return Message(self.kind, source, self.id, parcel)


def is_bulk(length: int) -> bool:
    return length >= BULK_FROM


@functools.cache
def _table(pieces: int) -> struct.Struct:
    """Return the form of the table of lengths, with the padding that follows."""
    return struct.Struct(f"<{pieces}Q{-(START + LENGTH * pieces) % ALIGNMENT}x")


def pack(
    kind: Kind, identifier: int, number: int, parcel: Parcel | None, put: Callable[[memoryview], int] = lambda piece: 0
) -> tuple[bytes, list[memoryview]]:
    """Return the frame of a message, and the pieces that must follow it.

    ``put``: puts a large piece where the receiver finds it, and returns that place; 0 if it must follow.

    Raises:
      WireError: the small pieces are too many for one frame.
    """
    pieces, attached = list[Any](), 0
    if parcel is not None:
        attached = len(parcel.attached)
        pieces = [memoryview(b"".join([parcel.attached, parcel.stream])) if attached else parcel.stream]
        pieces += parcel.buffers
    lengths = [piece.nbytes for piece in pieces]
    inside = sum(PLACE.size if is_bulk(length) else padded(length) for length in lengths)
    if padded(START + LENGTH * len(lengths)) + inside > LONGEST_FRAME:
        raise WireError(
            f"its arrays of less than 64 KiB have {inside / 2**30:.1f} GiB together, and a message takes less than "
            "2 GiB of them. Send several messages, or put them together to larger arrays"
        )
    parts: list[Any] = [_table(len(lengths)).pack(*lengths)]
    bulk = []
    for piece, length in zip(pieces, lengths, strict=True):
        if is_bulk(length):
            place = put(piece)
            parts.append(PLACE.pack(place))
            if not place:
                bulk.append(piece)
        else:
            parts += piece, padding(length)
    return b"".join((HEADER.pack(kind, len(pieces), attached, number, identifier), *parts)), bulk


def unpack(frame: Any) -> Frame:
    view = memoryview(frame)
    code, count, attached, number, identifier = HEADER.unpack_from(view)
    lengths, start = _table(count).unpack_from(view, START), padded(START + LENGTH * count)
    pieces, places = list[Any](), list[int]()
    for length in lengths:
        if is_bulk(length):
            pieces.append(None)
            places += PLACE.unpack_from(view, start)
            start += PLACE.size
        else:
            pieces.append(view[start : start + length])
            start += padded(length)
    return Frame(KINDS[code], identifier, number, attached, lengths, pieces, places)
