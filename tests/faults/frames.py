"""Bytes that are no messages, and damaged messages: refused and logged, and what is under way stays right."""

import logging
import operator
import random
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from helpers.data import damaged

import jdistgrad as jd
from faults.outcomes import Outcome
from faults.program import judged
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import frames, plain
from jdistgrad.wire.message import WORK, Kind, Parcel

TOGETHER = 1000  # frames between checks
BODIES = {Kind.DROP: [(5, 1, 0)], Kind.LEAVE: "it left", Kind.REPORT: (True, False, 0, 0)}


def frame_of(kind: Kind, number: int = 0) -> bytearray:
    call = Parcel(memoryview(b"a stream"), [memoryview(bytes(frames.BULK_FROM))], plain.pack([(7, 0, 1, 0)]))
    body = Parcel(memoryview(plain.pack(BODIES[kind])), []) if kind in BODIES else call
    return frames.pack(kind, 1 << 40, number, body)[0]


def refused(kind: Kind, chance: random.Random, numbers: Iterator[int]) -> bytes:
    """Return bytes that no rank may take for a message: random ones, cut ones, or a frame with a damaged header.

    Of kinds that carry no work, the contents may be damaged instead: nobody waits for them.
    """
    whole = frame_of(kind)
    way = chance.choice(["random", "cut", "header", "contents"])
    if way == "random":
        return chance.randbytes(chance.randrange(1, 200))
    if way == "cut":
        return bytes(whole[: chance.randrange(1, frames.START)])
    if way == "contents" and kind not in WORK:
        return bytes(damaged(frame_of(kind, next(numbers)), chance, frames.START))
    frame = whole
    while frame[: frames.START] == whole[: frames.START]:
        frame = damaged(whole[: frames.START], chance) + whole[frames.START :]
    return bytes(frame)


def twice(x):
    return 2 * x


def lost() -> list[str]:
    return list(current_worker().peers.lost.values())


def under_way() -> int:
    return len(current_worker().transport._incoming)


def play(chance: random.Random, count: int) -> Iterator[Outcome]:
    """Send bytes to the next rank, ``TOGETHER`` at a time, and call it meanwhile."""
    logging.getLogger("jdistgrad.wire").setLevel(logging.CRITICAL)
    logging.getLogger("jdistgrad.rpc").setLevel(logging.CRITICAL)
    me = jd.init(timeout=60)
    peer, worker, sent = (me.rank + 1) % jd.world_size(), current_worker(), 0
    x, numbers = jnp.arange(5.0), worker.transport._numbers[peer]
    while sent < count:
        calls = [jd.rpc_async(peer, twice, args=(x + k,)) for k in range(10)]
        now = min(TOGETHER, count - sent)
        for _ in range(now):
            worker.transport._comm.Send(refused(chance.choice(list(Kind)), chance, numbers), peer, 0)
        problem = "" if all(np.array_equal(call.result(), 2 * (x + k)) for k, call in enumerate(calls)) else "wrong"
        problem += "" if jd.rpc_sync(peer, operator.add, args=(1, 2)) == 3 else " wrong afterwards"
        left = jd.rpc_sync(peer, under_way), jd.rpc_sync(peer, lost)
        problem += f" {left}" if left[1] or left[0] > 1 else ""
        sent += now
        yield from (judged("bytes", problem if k == 0 else "", named=True) for k in range(now))
    jd.shutdown()
