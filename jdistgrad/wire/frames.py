"""The bytes of a message: one frame, and the large buffers that follow it.

A frame is a fixed header, a table of piece lengths, and the pieces: first what is attached and the pickle stream, then
the stream's buffers. Pieces of at least ``BULK_FROM`` bytes stay out of the frame and travel by themselves, uncopied.
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
PADDING = bytes(ALIGNMENT)
HEADER = struct.Struct("<4sB3xIIIQ")  # magic, kind, stream tag, number of pieces, bytes attached, id
LENGTH = 8  # bytes that tell the length of a piece
KINDS = {kind.value: kind for kind in Kind}


@dataclasses.dataclass(slots=True)
class Frame:
    """A frame taken apart: pieces in order, None where a piece is still to come by itself."""

    kind: Kind
    id: int
    stream_tag: int
    attached: int
    lengths: tuple[int, ...]
    pieces: list[Any]

    def missing(self) -> list[int]:
        return [k for k, piece in enumerate(self.pieces) if piece is None]

    def message(self, source: int) -> Message:
        if not self.pieces:
            return Message(self.kind, source, self.id)
        first = memoryview(self.pieces[0])
        parcel = Parcel(first[self.attached :], self.pieces[1:], first[: self.attached])
        return Message(self.kind, source, self.id, parcel)


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def _padding(length: int) -> bytes:
    return PADDING[: -length % ALIGNMENT]


def is_bulk(length: int) -> bool:
    return length >= BULK_FROM


def pieces_of(parcel: Parcel | None) -> list[memoryview]:
    if parcel is None:
        return []
    first = parcel.stream if not parcel.attached else memoryview(b"".join([parcel.attached, parcel.stream]))
    return [first, *parcel.buffers]


def pack(kind: Kind, identifier: int, stream_tag: int, parcel: Parcel | None) -> tuple[bytes, list[memoryview]]:
    """Write the frame of a message; also returns the pieces that must follow it."""
    pieces, attached = pieces_of(parcel), 0 if parcel is None else len(parcel.attached)
    lengths = [piece.nbytes for piece in pieces]
    header = HEADER.pack(MAGIC, kind, stream_tag, len(pieces), attached, identifier)
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    parts: list[Any] = [header, table, _padding(len(header) + len(table))]
    for piece, length in zip(pieces, lengths, strict=True):
        if length < BULK_FROM:
            parts += piece, _padding(length)
    return b"".join(parts), [piece for piece in pieces if piece.nbytes >= BULK_FROM]


def unpack(frame: Any) -> Frame:
    """Take a frame apart.

    Raises:
      WireError: not a frame, or cut short. Its ``id`` and ``kind`` say which message, where the header is whole.
    """
    if len(frame) < HEADER.size or frame[:4] != MAGIC:
        raise WireError(f"{len(frame)} bytes that are no message arrived: {bytes(frame[:16])!r}...")
    _, code, stream_tag, count, attached, identifier = HEADER.unpack_from(frame)
    kind = KINDS.get(code)
    if kind is None:
        raise WireError(f"a message of unknown kind {code} arrived")
    start = _padded(HEADER.size + LENGTH * count)
    lengths = struct.unpack_from(f"<{count}Q", frame, HEADER.size) if start <= len(frame) else ()
    expected = start + sum(_padded(length) for length in lengths if length < BULK_FROM)
    if expected != len(frame):
        raise WireError(
            f"a message was cut short: expected {expected} bytes, got {len(frame)}", kind=kind, id=identifier
        )
    return Frame(kind, identifier, stream_tag, attached, lengths, _inline_pieces(frame, start, lengths))


def _inline_pieces(frame: Any, start: int, lengths: Sequence[int]) -> list[Any]:
    view, pieces = memoryview(frame), list[Any]()
    for length in lengths:
        if is_bulk(length):
            pieces.append(None)
        else:
            pieces.append(view[start : start + length])
            start += _padded(length)
    return pieces
