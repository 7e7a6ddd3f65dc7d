"""The bytes of messages."""

import numpy as np
from hypothesis import given, strategies as st

from jdistgrad.wire import frames
from jdistgrad.wire.message import Kind, Message, Parcel


def pack(pieces, kind=Kind.CALL, attached=b"", scope=None, **put):
    views = [memoryview(piece) for piece in pieces]
    parcel = Parcel(views[0], views[1:], attached) if views else None
    return frames.pack(Message(kind, 0, 5, scope=scope), parcel, 77, **put)


def missing(taken):
    return [k for k, piece in enumerate(taken.pieces) if piece is None]


@given(st.lists(st.binary(max_size=100), max_size=6), st.sampled_from(Kind), st.none() | st.integers(0, 1 << 62))
def test_small_pieces_travel_in_the_frame(pieces, kind, scope):
    frame, bulk = pack(pieces, kind, scope=scope)
    taken = frames.unpack(frame, 3)
    assert bulk == []
    assert taken.number == 77
    assert [bytes(piece) for piece in taken.pieces] == pieces
    message = taken.complete()
    assert (message.kind, message.source, message.id, message.scope) == (kind, 3, 5, scope)
    assert (message.body is None) == (not pieces)


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_what_is_attached_is_told_apart_from_the_stream(attached, stream):
    frame, _ = pack([stream, b"buffer"], attached=attached)
    parcel = frames.unpack(frame, 3).complete().body
    assert (bytes(parcel.attached), bytes(parcel.stream)) == (attached, stream)
    assert [bytes(buffer) for buffer in parcel.buffers] == [b"buffer"]


def test_large_pieces_follow_uncopied():
    large = np.arange(frames.BULK_FROM, dtype=np.uint8)
    frame, bulk = pack([b"abc", large, b"de"])
    taken = frames.unpack(frame, 3)
    assert missing(taken) == [1]
    assert taken.lengths == (3, frames.BULK_FROM, 2)
    assert bytes(taken.pieces[2]) == b"de"
    assert np.shares_memory(np.asarray(bulk[0]), large)


def test_what_has_a_place_does_not_follow():
    large, places = bytes(frames.BULK_FROM), iter([7, 0, 1 << 60])
    frame, bulk = pack([b"abc", large, b"de", large + b"follows", large], put=lambda piece: next(places))
    taken = frames.unpack(frame, 3)
    assert (missing(taken), taken.places) == ([1, 3, 4], [7, 0, 1 << 60])
    assert [bytes(piece) for piece in bulk] == [large + b"follows"]
    assert bytes(taken.pieces[2]) == b"de"


def test_pieces_are_aligned_for_arrays():
    frame, _ = pack([b"x" * 5, np.ones(3).view(np.uint8)])
    piece = frames.unpack(frame, 3).pieces[1]
    assert np.frombuffer(piece, np.uint8).ctypes.data % 8 == 0
