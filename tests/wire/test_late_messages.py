"""Messages that come late, and so in another order, change no number; late answers are counted."""

import collections
import random
import threading

import jax.numpy as jnp
import pytest
from helpers.unruly import make_unruly
from helpers.worlds import make_weights, on_every_worker, on_worker0

import jdistgrad as jd
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.scopes import Inbox
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.message import MessageType
from jdistgrad.wire.polling import poll


def taken(key, seconds):
    """Return the value that was pushed here under a key; raise TimeoutError if it has not come in time."""

    def wait(futures):
        current_worker().transport.wait_for(futures, seconds)
        futures[0].result(seconds)

    return current_scope().content(Inbox).take(key, current_worker().transport.look, wait)


def weigh(params, x):
    return (params["w"] * x).sum() * params["n"]


_counted = collections.Counter()


def count(*call):
    """Count calls: one that is served twice counts twice."""
    _counted[jd.worker_info().rank, *call] += 1
    return _counted[jd.worker_info().rank, *call]


def work(rank, size, turn):
    """Do work of every kind; return numbers that must be the same however messages come."""
    peers = [(rank + k) % size for k in range(1, size)]
    params = [jd.remote(peer, make_weights, args=(peer,)) for peer in peers]

    def loss(params, x):
        return sum(jd.rpc_sync(p, weigh, args=(one, x)) for p, one in zip(peers, params, strict=True))

    found = [jd.value_and_grad(loss)(params, jnp.arange(3.0) + k) for k in range(3)]
    values = [(float(value), [g.to_here()["w"].tolist() for g in grads]) for value, grads in found]
    with jd.context():
        for peer in peers:
            current_worker().push(peer, (0,), jnp.full(peer + 2, rank))
        pushed = [jd.rpc_sync(peer, taken, args=((0,), 20)).tolist() for peer in peers]
    return values, pushed, [jd.rpc_sync(peer, count, args=(rank, turn, k)) for peer in peers for k in range(5)]


_let_go = collections.defaultdict(threading.Event)  # by rank


def wait_to_be_let_go():
    _let_go[current_worker().rank].wait(30)


def let_go():
    _let_go.pop(current_worker().rank).set()


@on_worker0
def test_an_answer_that_comes_too_late_is_counted(big_world):
    worker, peer = current_worker(), jd.world_size() - 1
    before = worker.refused[peer]
    with pytest.raises(jd.CallTimeoutError):
        jd.rpc_sync(peer, wait_to_be_let_go, timeout=0.3)
    jd.rpc_sync(peer, let_go)
    assert poll(lambda: worker.refused[peer] == before + 1, 20)


@on_every_worker
def test_messages_that_come_late_change_nothing(big_world, rank, size):
    quiet = work(rank, size, 0)
    lateness = make_unruly(random.Random(rank))
    jd.barrier()  # nobody has called a worker that is not unruly yet
    assert work(rank, size, 1) == quiet
    jd.barrier()  # the others have called this worker too
    assert {MessageType.CALL, MessageType.RESULT} <= lateness.late
