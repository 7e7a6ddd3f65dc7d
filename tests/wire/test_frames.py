"""The bytes of messages."""

import numpy as np
from hypothesis import given, strategies as st

from jdistgrad.wire import frames
from jdistgrad.wire.message import Message, MessageType, Parcel


def pack(pieces, kind=MessageType.CALL, attached=b"", scope=None, **put):
    views = [memoryview(piece) for piece in pieces]
    parcel = Parcel(views[0], views[1:], attached) if views else None
    return frames.pack(Message(kind, 0, 5, scope=scope), parcel, 77, **put)


@given(
    st.lists(st.binary(max_size=100), max_size=6),
    st.sampled_from(MessageType),
    st.none() | st.integers(0, 1 << 62),
    st.binary(max_size=50),
)
def test_small_pieces_travel_in_the_frame(pieces, kind, scope, attached):
    frame, bulk = pack(pieces, kind, attached, scope)
    taken = frames.unpack(frame, 3)
    assert (bulk, taken.number) == ([], 77)
    message = taken.complete()
    assert (message.kind, message.source, message.id, message.scope) == (kind, 3, 5, scope)
    assert (message.body is None) == (not pieces)
    if pieces:
        assert bytes(message.body.attached) == attached
        assert [bytes(piece) for piece in (message.body.stream, *message.body.buffers)] == pieces


def test_large_pieces_have_a_place_or_follow_uncopied():
    large, follows = bytes(frames.BULK_FROM), np.arange(frames.BULK_FROM + 1, dtype=np.uint8)
    places = iter([7, 0, 1 << 60])
    frame, bulk = pack([b"abc", large, b"de", follows, large], put=lambda piece: next(places))
    taken = frames.unpack(frame, 3)
    assert [k for k, piece in enumerate(taken.pieces) if piece is None] == [1, 3, 4]
    assert taken.places == {1: 7, 3: 0, 4: 1 << 60}
    assert taken.lengths == (3, frames.BULK_FROM, 2, frames.BULK_FROM + 1, frames.BULK_FROM)
    assert bytes(taken.pieces[2]) == b"de"
    assert len(bulk) == 1
    assert np.shares_memory(np.asarray(bulk[0]), follows)


def test_pieces_are_aligned_for_arrays():
    frame, _ = pack([b"x" * 5, np.ones(3).view(np.uint8)])
    piece = frames.unpack(frame, 3).pieces[1]
    assert np.frombuffer(piece, np.uint8).ctypes.data % 8 == 0
