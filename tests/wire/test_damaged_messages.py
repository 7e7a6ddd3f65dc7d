"""Damaged bytes between workers: the calls fail, no damaged call is served, no worker hangs, and the world ends."""

import operator
import random

import numpy as np
import pytest
from helpers.data import damaged
from helpers.worlds import last, needs_pickling, on_worker0, still_works, wire_world as wire_world

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import frames, plain
from jdistgrad.wire.message import CALLS, WORK, Kind, Parcel

pytestmark = needs_pickling


def transfers_under_way():
    return len(current_worker().transport._incoming)


def refused():
    """Return how many messages of worker 0 this worker has refused."""
    return current_worker().refused[0]


def lost():
    return list(current_worker().peers.lost.values())


BODIES = {Kind.DROP: [(5, 1, 0)], Kind.LEAVE: "it left", Kind.REPORT: (True, False, 0, 0)}


def frame_of(kind):
    large = memoryview(bytes(frames.BULK_FROM))
    call = Parcel(memoryview(b"a stream"), [large], plain.pack([(7, 0, 1, 0)]))
    body = Parcel(memoryview(plain.pack(BODIES[kind])), []) if kind in BODIES else call
    return frames.pack(kind, 1 << 40, 1 << 60, body)[0]


@on_worker0
def test_damaged_headers_of_every_kind_are_ignored(wire_world):
    """Thousands of damaged frames of all kinds arrive, and none is taken for a message."""
    worker, chance = current_worker(), random.Random(3)
    before = jd.rpc_sync(last(), refused)
    for kind in Kind:
        whole = frame_of(kind)
        for _ in range(300):
            frame = whole
            while frame[: frames.START] == whole[: frames.START]:
                frame = damaged(whole[: frames.START], chance) + whole[frames.START :]
            worker.transport._comm.Send(frame, last(), 0)
    still_works()
    assert jd.rpc_sync(last(), refused) == before + 300 * len(Kind)
    assert jd.rpc_sync(last(), transfers_under_way) == 0
    assert [jd.rpc_sync(rank, lost) for rank in range(jd.world_size())] == [[]] * jd.world_size()


@on_worker0
def test_damaged_contents_of_what_answers_nothing_are_ignored(wire_world):
    worker, chance = current_worker(), random.Random(4)
    for kind in set(Kind) - WORK:
        for _ in range(300):
            worker.transport._comm.Send(damaged(frame_of(kind), chance, frames.START), last(), 0)
    still_works()
    assert jd.rpc_sync(last(), transfers_under_way) == 0
    assert [jd.rpc_sync(rank, lost) for rank in range(jd.world_size())] == [[]] * jd.world_size()


@pytest.mark.parametrize("size", [3, frames.BULK_FROM])
@on_worker0
def test_damaged_calls_fail_and_count_as_done(wire_world, size):
    """Damage after the header reaches the caller as an error; the world ends although work was lost."""
    transport, chance = current_worker().transport, random.Random(size)
    genuine = transport.send

    def send_damaged(peer, message):
        if message.kind not in CALLS | {Kind.PUSH}:  # such as the drop of a reference
            genuine(peer, message)
            return
        frame, _ = frames.pack(message.kind, message.id, next(transport._numbers[peer]), message.body)
        transport._comm.Send(damaged(frame, chance, frames.START), peer, 0)

    for _ in range(100):
        transport.send = send_damaged
        futures = [
            jd.rpc_async(last(), operator.neg, args=(np.ones(size, np.uint8),)),
            jd.remote(last(), operator.neg, args=(np.ones(size, np.uint8),)).creation(),
        ]
        with jd.context():
            current_worker().push(last(), (0,), np.ones(size, np.uint8))
        del transport.send
        for future in futures:
            assert isinstance(future.exception(20), jd.WireError)
    still_works()
    assert jd.rpc_sync(last(), transfers_under_way) == 0


@on_worker0
def test_a_damaged_answer_fails_its_call(wire_world):
    for seed in range(20):
        with pytest.raises(jd.WireError, match=r"wrong length|damaged on its way"):
            jd.rpc_sync(last(), answer_damaged, args=(seed,), timeout=20)
    still_works()


def answer_damaged(seed):
    """Send the next message from here, which is the answer to this call, damaged."""
    transport, chance = current_worker().transport, random.Random(seed)

    def send_damaged(peer, message):
        del transport.send
        frame, _ = frames.pack(message.kind, message.id, next(transport._numbers[peer]), message.body)
        transport._comm.Send(damaged(frame, chance, frames.START), peer, 0)

    transport.send = send_damaged
    return seed
