"""The bytes of a message: one frame, and the large buffers that follow it.

A frame is a fixed header, a table of piece lengths, and the pieces. The first piece is the attached bytes and the
pickle stream; the others are the stream's buffers. Pieces of at least ``BULK_FROM`` bytes stay out of the frame. In
their stead, the frame holds the place where the receiver finds the piece in the sender's shared memory; if that is 0,
the piece follows the frame, uncopied.

The header has a checksum of its own, so it identifies the message even if the rest is damaged. A second checksum covers
all that follows in the frame, including the lengths of the separate pieces. Both cost less than a microsecond.
"""

import dataclasses
import functools
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.errors import WireError
from jdistgrad.wire.arrays import ALIAS_FROM, ALIGNMENT, padded, padding
from jdistgrad.wire.message import Kind, Message, Parcel

MAGIC = b"jdg4"
BULK_FROM = ALIAS_FROM
HEADER = struct.Struct("<4sB3xIIQQI")  # magic, kind, pieces, bytes attached, number, id, checksum of what follows
CHECKSUM = struct.Struct("<I")  # of the header
START = HEADER.size + CHECKSUM.size
PLACE = struct.Struct("<Q8x")
LENGTH = 8  # bytes of one entry in the table of lengths
LONGEST = 1 << 44  # limit of a piece in bytes: more than any machine has
LONGEST_FRAME = (1 << 31) - 1  # bytes: MPI counts those of a frame in a C int
ALWAYS_FIT = LONGEST_FRAME // (2 * BULK_FROM)  # pieces of any length
KINDS = {kind.value: kind for kind in Kind}


@dataclasses.dataclass(slots=True)
class Frame:
    """A parsed frame: its pieces in order, None for a separate piece.

    ``number``: how many frames the sender had sent to this receiver before it.
    ``places``: of the separate pieces, in order.
    """

    kind: Kind
    id: int
    number: int
    attached: int
    lengths: tuple[int, ...]
    pieces: list[Any]
    places: list[int]

    def missing(self) -> list[int]:
        return [k for k, piece in enumerate(self.pieces) if piece is None]

    def message(self, source: int) -> Message:
        if not self.pieces:
            return Message(self.kind, source, self.id)
        first = memoryview(self.pieces[0])
        parcel = Parcel(first[self.attached :], self.pieces[1:], first[: self.attached])
        return Message(self.kind, source, self.id, parcel)


def is_bulk(length: int) -> bool:
    return length >= BULK_FROM


def pieces_of(parcel: Parcel | None) -> list[memoryview]:
    if parcel is None:
        return []
    first = parcel.stream if not parcel.attached else memoryview(b"".join([parcel.attached, parcel.stream]))
    return [first, *parcel.buffers]


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
    pieces, attached = pieces_of(parcel), 0 if parcel is None else len(parcel.attached)
    lengths = [piece.nbytes for piece in pieces]
    _require_room(lengths)
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
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    header = HEADER.pack(MAGIC, kind, len(pieces), attached, number, identifier, checksum)
    return b"".join((header, CHECKSUM.pack(zlib.crc32(header)), *parts)), bulk


def _require_room(lengths: Sequence[int]) -> None:
    if len(lengths) <= ALWAYS_FIT:
        return
    inside = sum(PLACE.size if is_bulk(length) else padded(length) for length in lengths)
    if padded(START + LENGTH * len(lengths)) + inside > LONGEST_FRAME:
        raise WireError(
            f"its arrays of less than 64 KiB have {inside / 2**30:.1f} GiB together, and a message takes less than "
            "2 GiB of them. Send several messages, or put them together to larger arrays"
        )


def unpack(frame: Any) -> Frame:
    """Parse a frame.

    Raises:
      WireError: the bytes are no frame, or a damaged frame. ``id``, ``kind`` and ``number`` identify the message if
        the header is intact.
    """
    view = memoryview(frame)
    kind, count, attached, number, identifier, checksum = _header(view)
    start = padded(START + LENGTH * count)
    lengths = _table(count).unpack_from(view, START) if start <= len(view) else ()
    pieces, places, expected = _contents(view, start, lengths)
    if expected != len(view):
        found = f"has the wrong length: expected {expected} bytes, got {len(view)}"
    elif zlib.crc32(view[START:]) != checksum:
        found = "was damaged on its way: its checksum does not match"
    elif attached > (lengths[0] if lengths else 0) or max(lengths, default=0) > LONGEST:
        found = f"makes no sense: {attached} bytes attached, in pieces of {lengths} bytes"
    else:
        return Frame(kind, identifier, number, attached, lengths, pieces, places)
    raise WireError(f"a message {found}", kind=kind, id=identifier, number=number)


def _header(view: memoryview) -> tuple[Kind, int, int, int, int, int]:
    """Return the fields of the header after the magic. Raises WireError if there is no header, or a damaged one."""
    if len(view) < START or view[:4] != MAGIC:
        raise WireError(f"{len(view)} bytes that are no message arrived: {bytes(view[:16])!r}...")
    if CHECKSUM.unpack_from(view, HEADER.size)[0] != zlib.crc32(view[: HEADER.size]):
        raise WireError(f"a message whose header was damaged arrived: {bytes(view[:START])!r}")
    _, code, *rest = HEADER.unpack_from(view)
    kind = KINDS.get(code)
    if kind is None:
        raise WireError(f"a message of unknown kind {code} arrived")
    return kind, *rest


def _contents(view: memoryview, start: int, lengths: Sequence[int]) -> tuple[list[Any], list[int], int]:
    """Return the pieces that a frame holds, the places of the separate ones, and where the frame should end."""
    pieces, places = list[Any](), list[int]()
    for length in lengths:
        if is_bulk(length):
            pieces.append(None)
            places += PLACE.unpack_from(view, start) if start + PLACE.size <= len(view) else (0,)
            start += PLACE.size
        else:
            pieces.append(view[start : start + length])
            start += padded(length)
    return pieces, places, start
