"""The bytes of a message: one frame, and the large buffers that follow it.

A frame is a fixed header, a table of piece lengths, and the pieces: the pickle stream, what is attached to
it, and its buffers.
Pieces of at least ``BULK_FROM`` bytes stay out of the frame and travel by themselves, uncopied.
"""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

from jdistgrad.errors import WireError
from jdistgrad.wire.arrays import ALIAS_FROM
from jdistgrad.wire.message import Kind, Message, Parcel

MAGIC = b"jdg1"
BULK_FROM = ALIAS_FROM
ALIGNMENT = 16
HEADER = struct.Struct("<4sB3xIIQ")  # magic, kind, stream tag, number of pieces, id
LENGTH = struct.Struct("<Q")


@dataclasses.dataclass(slots=True)
class Frame:
    """A frame taken apart: pieces in order, None where a piece is still to come by itself."""

    kind: Kind
    id: int
    stream_tag: int
    lengths: tuple[int, ...]
    pieces: list[Any]

    def missing(self) -> list[int]:
        return [k for k, piece in enumerate(self.pieces) if piece is None]

    def message(self, source: int) -> Message:
        body = Parcel(self.pieces[0], self.pieces[2:], self.pieces[1]) if self.pieces else None
        return Message(self.kind, source, self.id, body)


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def is_bulk(length: int) -> bool:
    return length >= BULK_FROM


def pack(
    kind: Kind, identifier: int, stream_tag: int, pieces: Sequence[memoryview]
) -> tuple[bytearray, list[memoryview]]:
    """Write the frame of a message; also returns the pieces that must follow it."""
    lengths = [piece.nbytes for piece in pieces]
    start = _padded(HEADER.size + LENGTH.size * len(pieces))
    frame = bytearray(start + sum(_padded(n) for n in lengths if not is_bulk(n)))
    HEADER.pack_into(frame, 0, MAGIC, kind, stream_tag, len(pieces), identifier)
    struct.pack_into(f"<{len(lengths)}Q", frame, HEADER.size, *lengths)
    for piece, length in zip(pieces, lengths, strict=True):
        if not is_bulk(length):
            frame[start : start + length] = piece
            start += _padded(length)
    return frame, [piece for piece, length in zip(pieces, lengths, strict=True) if is_bulk(length)]


def unpack(frame: bytearray) -> Frame:
    """Take a frame apart.

    Raises:
      WireError: not a frame, or cut short. Its ``id`` and ``kind`` say which message, where the header is whole.
    """
    if len(frame) < HEADER.size or frame[:4] != MAGIC:
        raise WireError(f"{len(frame)} bytes that are no message arrived: {bytes(frame[:16])!r}...", kind=None, id=None)
    _, kind, stream_tag, count, identifier = HEADER.unpack_from(frame)
    if kind not in Kind._value2member_map_:
        raise WireError(f"a message of unknown kind {kind} arrived", kind=None, id=None)
    start = _padded(HEADER.size + LENGTH.size * count)
    lengths = struct.unpack_from(f"<{count}Q", frame, HEADER.size) if start <= len(frame) else ()
    expected = start + sum(_padded(n) for n in lengths if not is_bulk(n))
    if expected != len(frame):
        raise WireError(
            f"a message was cut short: expected {expected} bytes, got {len(frame)}", kind=Kind(kind), id=identifier
        )
    if count == 1:
        raise WireError("a message without what belongs to its stream arrived", kind=Kind(kind), id=identifier)
    return Frame(Kind(kind), identifier, stream_tag, lengths, _inline_pieces(frame, start, lengths))


def _inline_pieces(frame: bytearray, start: int, lengths: Sequence[int]) -> list[Any]:
    view, pieces = memoryview(frame), list[Any]()
    for length in lengths:
        if is_bulk(length):
            pieces.append(None)
        else:
            pieces.append(view[start : start + length])
            start += _padded(length)
    return pieces
