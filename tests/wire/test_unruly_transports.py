"""Messages that get lost, come late or twice, or cannot be sent: what a transport does by kind, and what users see."""

import collections
import operator
import random
import threading

import jax.numpy as jnp
import pytest
from helpers.unruly import Fate, Fates, make_unruly
from helpers.worlds import (
    make,
    make_weights,
    on_every_worker,
    on_worker0,
    owned_here,
    still_works,
    takes_part,
    wait_until_nobody_takes_part,
    wait_until_owned,
)

import jdistgrad as jd
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.inbox import Inbox
from jdistgrad.rpc.members import closing
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire import launcher_env
from jdistgrad.wire.local import LocalTransport
from jdistgrad.wire.message import Kind
from jdistgrad.wire.polling import poll

SOON = 0.2  # timeouts of what is not answered
_fates = {}


def unruly(fate, *kinds):
    """Let this worker's next messages of these kinds have a fate."""
    worker = current_worker()
    if _fates.get(worker.rank, (None,))[0] is not worker:
        _fates[worker.rank] = worker, make_unruly()
    _fates[worker.rank][1].ask(fate, *kinds)


def answers_unruly(fate, kind, x):
    unruly(fate, kind)
    if kind is Kind.FAILURE:
        raise ValueError(x)
    return x


def taken(key, seconds):
    """Return the value that was pushed here under a key; raise TimeoutError if it has not come in time."""

    def wait(futures):
        current_worker().wait_for(futures, seconds)
        futures[0].result(seconds)

    return current_scope().content(Inbox).take(key, current_worker().transport.look, wait)


def is_closing():
    return current_worker().closing.wanted


def leave_lossy():
    """End a world in which messages with work were lost: it never gets quiet, which rank 0 is told in time."""
    if jd.worker_info().rank:
        with pytest.raises(jd.WorkerLostError, match=r"worker0 .* left with shutdown\(graceful=False\)"):
            jd.shutdown()
        return
    assert poll(lambda: all(jd.rpc_sync(k, is_closing) for k in range(1, jd.world_size())), 20)
    with pytest.raises(jd.CallTimeoutError, match=r"waited 0\.3 s for messages on their way"):
        jd.shutdown(timeout=0.3)
    jd.shutdown(graceful=False)


def test_what_a_lost_message_would_have_brought_ends_in_a_timeout_that_names_it(big_world):
    def main():
        if jd.init().rank == 0:
            lose_one_of_each()
            assert len(current_worker().calls) == 0
            still_works()
        leave_lossy()

    big_world.run(main)


def lose_one_of_each():
    named = r"{} on worker2 \(rank 2\), called by worker0 \(rank 0\) as call 0:\d+, was not answered within 0.2 s"
    unruly(Fate.DROPPED, Kind.CALL)
    with pytest.raises(jd.CallTimeoutError, match=named.format("add")):
        jd.rpc_sync(2, operator.add, args=(1, 2), timeout=SOON)
    unruly(Fate.DROPPED, Kind.REMOTE)
    never = jd.remote(2, make, args=(3,), timeout=SOON)
    with pytest.raises(jd.CallTimeoutError, match=named.format("make")):
        never.creation().result()
    del never
    for kind in (Kind.RESULT, Kind.FAILURE):
        with pytest.raises(jd.CallTimeoutError, match=named.format("answers_unruly")):
            jd.rpc_sync(2, answers_unruly, args=(Fate.DROPPED, kind, 3), timeout=SOON)
    with jd.context():
        unruly(Fate.DROPPED, Kind.PUSH)
        current_worker().push(2, (0,), jnp.ones(3))
        with pytest.raises(TimeoutError):
            jd.rpc_sync(2, taken, args=((0,), SOON))
    unruly(Fate.DROPPED, Kind.RELEASE)
    with jd.context():
        assert jd.rpc_sync(2, jnp.square, args=(3,)) == 9
    assert len(jd.rpc_sync(2, takes_part)) == 1


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REMOTE])
@on_worker0
def test_a_call_that_cannot_be_sent_fails_at_once(big_world, kind):
    unruly(Fate.FAILED, kind)
    call = jd.rpc_sync if kind is Kind.CALL else jd.remote
    with pytest.raises(jd.WireError, match=r"cannot call .*make on worker2 .*: the message to rank 2 could not"):
        call(2, make, args=(3,))
    assert len(current_worker().calls) == 0
    wait_until_owned(2, 0)
    still_works()


@on_worker0
def test_one_of_several_calls_cannot_be_sent(big_world):
    unruly(Fate.FAILED, Kind.CALL)
    first, *others = jd.rpc_all([1, 2, 0], make, args=(3,))
    with pytest.raises(jd.WireError, match=r"cannot call .*make on worker1"):
        first.result()
    assert [other.result().tolist() for other in others] == 2 * [[0, 1, 2]]


@on_worker0
def test_an_answer_that_cannot_be_sent_is_told_to_the_caller(big_world):
    with pytest.raises(jd.EncodingError, match=r"worker2 .*cannot send the result of .*answers_unruly to worker0"):
        jd.rpc_sync(2, answers_unruly, args=(Fate.FAILED, Kind.RESULT, 3))
    with pytest.raises(jd.RemoteError, match="ValueError: 3"):  # a second time, in words
        jd.rpc_sync(2, answers_unruly, args=(Fate.FAILED, Kind.FAILURE, 3))
    still_works()


@on_worker0
def test_a_pushed_value_that_cannot_be_sent(big_world):
    with jd.context():
        unruly(Fate.FAILED, Kind.PUSH)
        with pytest.raises(jd.WireError, match="the message to rank 2 could not be sent"):
            current_worker().push(2, (0,), jnp.ones(3))
        current_worker().push(2, (0,), jnp.ones(3))
        assert jd.rpc_sync(2, taken, args=((0,), 20)).tolist() == [1, 1, 1]
    wait_until_nobody_takes_part()


@on_worker0(leftovers=1)
def test_the_end_of_a_context_that_one_worker_cannot_be_told_is_an_error_and_the_others_are_told(big_world):
    unruly(Fate.FAILED, Kind.RELEASE)
    with pytest.raises(jd.WireError, match=r"the message to rank [12] could not be sent"), jd.context():
        assert [jd.rpc_sync(k, jnp.square, args=(3,)) for k in (1, 2)] == [9, 9]
    with jd.context():
        assert [jd.rpc_sync(k, jnp.square, args=(3,)) for k in (1, 2)] == [9, 9]
    assert poll(lambda: sum(len(jd.rpc_sync(k, takes_part)) for k in (1, 2)) == 1, 20)


@on_worker0(leftovers=1)
def test_weight_that_cannot_be_returned_leaves_the_value_at_its_owner(big_world):
    unruly(Fate.FAILED, Kind.DROP)
    reference = jd.remote(2, make, args=(3,))
    assert reference.to_here().shape == (3,)
    del reference
    assert poll(lambda: _fates[0][1].met[Fate.FAILED, Kind.DROP], 20)
    another = jd.remote(2, make, args=(4,))
    assert another.to_here().shape == (4,)
    del another
    wait_until_owned(2, 1)


@on_worker0(leftovers=1)
def test_weight_that_cannot_be_returned_to_one_owner_is_returned_to_the_others(big_world):
    references = [jd.remote(k, make, args=(3,)) for k in (1, 2)]
    assert [one.to_here().shape for one in references] == [(3,), (3,)]
    unruly(Fate.FAILED, Kind.DROP)
    references.clear()  # one flush for both
    assert poll(lambda: sum(jd.rpc_sync(k, owned_here) for k in (1, 2)) == 1, 20)


_held = []


def test_weight_that_cannot_be_returned_while_the_world_ends_does_not_keep_it(big_world, monkeypatch):
    report = closing.Closing._report

    def report_after_dropping(self):
        if self._mailbox.rank == 1 and self._wants_to_close:
            _held.clear()
        return report(self)

    monkeypatch.setattr(closing.Closing, "_report", report_after_dropping)

    def main():
        rank = jd.init().rank
        if rank == 1:
            _held.append(jd.remote(2, make, args=(3,)))
            assert _held[0].to_here().shape == (3,)
            unruly(Fate.FAILED, Kind.DROP)
        assert len(jd.shutdown(timeout=20)) == (rank == 2)

    big_world.run(main)


@pytest.mark.one_process
def test_who_cannot_tell_one_worker_that_it_leaves_tells_the_others_and_leaves(monkeypatch):
    send = LocalTransport.send

    def refusing(self, peer, message):
        if message.kind is Kind.LEAVE and peer == 1:
            raise jd.WireError("the message to rank 1 could not be sent")
        send(self, peer, message)

    monkeypatch.setattr(LocalTransport, "send", refusing)
    told = threading.Event()

    def main():
        rank = jd.init().rank
        if rank == 2:
            with pytest.raises(jd.WorkerLostError, match="worker0"):
                jd.shutdown(timeout=20)
            told.set()
        else:
            assert rank == 0 or told.wait(20)
            jd.shutdown(graceful=False)
            with pytest.raises(jd.NotInitializedError):
                jd.rpc_sync(2, operator.add, args=(1, 2))

    jd.spawn(main, 3)


@pytest.mark.parametrize("kind", [Kind.SURVEY, Kind.REPORT])
def test_a_shutdown_that_misses_a_message_names_a_worker_and_ends_when_tried_again(big_world, kind, monkeypatch):
    monkeypatch.setattr(closing, "ASK_SECONDS", 0.2)

    def main():
        rank = jd.init().rank
        if rank == (0 if kind is Kind.SURVEY else 2):
            unruly(Fate.DROPPED, kind)
        if rank == 0:
            assert poll(lambda: all(jd.rpc_sync(k, is_closing) for k in (1, 2)), 20)
            with pytest.raises(jd.CallTimeoutError, match=r"waited 0.3 s for worker[12] .*, which does not answer"):
                jd.shutdown(timeout=0.3)
        assert jd.shutdown() == []

    big_world.run(main)


def test_who_is_not_told_to_close_says_that_the_others_do_not_answer(big_world, monkeypatch):
    monkeypatch.setattr(closing, "ASK_SECONDS", 0.2)

    def main():
        if jd.init().rank == 0:
            unruly(Fate.DROPPED, Kind.CLOSE)
        if jd.worker_info().rank != 1:
            return jd.shutdown()
        with pytest.raises(jd.CallTimeoutError, match=r"for worker0 .*, which does not answer"):
            jd.shutdown(timeout=1)
        return jd.shutdown(graceful=False)

    big_world.run(main)
    if launcher_env.launched():  # MPI stood still here when only the others had freed the world's communicator
        add_in_halves()


def add_in_halves():
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    assert float(jd.collectives.MPI(half).allreduce(jnp.ones(()))) == half.size
    half.Free()


def test_a_world_that_cannot_be_told_to_close_ends_with_the_error(big_world):
    def main():
        if jd.init().rank == 0:
            unruly(Fate.FAILED, Kind.CLOSE)
            with pytest.raises(jd.WireError, match="could not be sent"):
                jd.shutdown()
        else:
            with pytest.raises(jd.WorkerLostError, match=r"worker0 .* its shutdown failed: .*the message to rank"):
                jd.shutdown()

    big_world.run(main)


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


@pytest.mark.skipif(not launcher_env.launched(), reason="threads hand objects over: the run with 3 ranks runs this")
@on_worker0
def test_a_message_that_comes_twice_is_served_once_and_counted(big_world):
    before = jd.rpc_sync(1, refused, args=(0,))
    unruly(Fate.TWICE, Kind.CALL)
    assert jd.rpc_sync(1, count, args=("twice",)) == 1
    assert poll(lambda: jd.rpc_sync(1, refused, args=(0,)) == before + 1, 20)
    assert jd.rpc_sync(1, count, args=("twice",)) == 2


def refused(source):
    return current_worker().refused[source]


@on_every_worker
def test_messages_that_come_late_or_twice_change_nothing(big_world, rank, size):
    quiet = work(rank, size, 0)
    twice = 0.5 if launcher_env.launched() else 0.0
    fates = make_unruly(fates=Fates(random.Random(rank), {Fate.LATE: 0.5, Fate.TWICE: twice}))
    jd.barrier()  # nobody has called a worker that is not unruly yet
    assert work(rank, size, 1) == quiet
    jd.barrier()  # the others have called this worker too
    assert {Kind.CALL, Kind.RESULT} <= {kind for _, kind in fates.met}
