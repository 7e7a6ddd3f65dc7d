"""Damaged messages are always detected, and the package's own plain messages cannot call anything."""

import contextlib
import os
import pickle
import random

import pytest
from helpers.data import damaged

from jdistgrad.errors import WireError
from jdistgrad.wire import frames, plain
from jdistgrad.wire.message import Kind, Parcel

LARGE = bytes(range(256)) * (frames.BULK_FROM // 256)
PARCELS = [
    None,
    Parcel(memoryview(b"a stream"), []),
    Parcel(memoryview(b"a stream" * 40), [memoryview(b"buffer" * k) for k in range(5)], b"what is attached"),
    Parcel(memoryview(b"a stream"), [memoryview(LARGE), memoryview(b"small"), memoryview(LARGE)]),
]


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("parcel", PARCELS, ids=["nothing", "small", "attached", "large"])
def test_a_damaged_frame_is_never_taken_for_a_message(kind, parcel):
    chance = random.Random(f"{kind} {PARCELS.index(parcel)}")
    frame, _ = frames.pack(kind, 1 << 48 | 7, 77, parcel)
    assert frames.unpack(frame).kind is kind
    for _ in range(200):
        with pytest.raises(WireError) as caught:
            frames.unpack(damaged(frame, chance))
        assert (caught.value.kind, caught.value.id) in ((None, None), (kind, 1 << 48 | 7))


@pytest.mark.parametrize("parcel", PARCELS, ids=["nothing", "small", "attached", "large"])
def test_behind_a_whole_header_it_is_known_which_message_was_damaged(parcel):
    chance = random.Random(5)
    frame, _ = frames.pack(Kind.REMOTE, 12, 77, parcel)
    for _ in range(200):
        with pytest.raises(WireError, match=r"wrong length|damaged on its way") as caught:
            frames.unpack(damaged(frame, chance, frames.START))
        assert (caught.value.kind, caught.value.id) == (Kind.REMOTE, 12)


def test_a_length_that_no_machine_has_is_refused():
    """A wrong length with a right checksum is unlikely, but must not lead to a huge allocation."""
    huge = type("Huge", (), {"nbytes": 1 << 62})()
    frame, _ = frames.pack(Kind.CALL, 1, 77, Parcel(memoryview(b"stream"), [huge]))
    with pytest.raises(WireError, match="makes no sense"):
        frames.unpack(frame)


SAYINGS = [
    [(1 << 48, 1 << 300, 64), (7, 1, 0)],
    (True, False, 12, 1 << 40),
    "it left: \ud800 \N{SNOWMAN}",
    None,
    {"a": 1.5},
]


@pytest.mark.parametrize("saying", SAYINGS, ids=lambda saying: type(saying).__name__)
def test_numbers_and_strings_arrive(saying):
    assert plain.unpack(memoryview(plain.pack(saying))) == saying


class Command:
    def __init__(self, *command):
        self.command = command

    def __reduce__(self):
        return self.command


@pytest.mark.parametrize("command", [(os.mkdir, ("made",)), (eval, ("open('made', 'w')",)), (list, ())], ids=str)
def test_what_would_call_something_is_refused(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(WireError, match="refers to"):
            plain.unpack(pickle.dumps([1, Command(*command)], protocol))
    assert not os.path.exists("made")


@pytest.mark.parametrize("saying", SAYINGS, ids=lambda saying: type(saying).__name__)
def test_garbled_numbers_and_strings_raise_nothing_else(saying):
    chance = random.Random(11)
    for _ in range(2000):
        with contextlib.suppress(WireError):
            plain.unpack(damaged(plain.pack(saying), chance))
