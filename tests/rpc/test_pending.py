"""The table of pending calls, driven by given times."""

import math

from hypothesis import given, strategies as st

from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.pending import Pending, PendingCalls


def call(identifier, *, peer=1, timeout=5.0, now=0.0):
    workers = WorkerInfo(peer, f"worker{peer}"), WorkerInfo(0, "worker0")
    return Pending(identifier, *workers, math.sqrt, timeout, now + timeout, None)


def test_calls_expire_at_their_own_deadline_only():
    calls = PendingCalls()
    calls.open(call(1, timeout=5.0, now=0.0))
    calls.open(call(2, timeout=1.0, now=2.0))
    calls.open(call(3, timeout=math.inf))
    assert [c.id for c in calls.expire(2.9)] == []
    assert [c.id for c in calls.expire(3.0)] == [2]
    assert [c.id for c in calls.expire(5.0)] == [1]
    assert [c.id for c in calls.expire(1e12)] == []
    assert len(calls) == 1


def test_a_lost_peer_takes_only_its_own_calls():
    calls = PendingCalls()
    for identifier, peer in ((1, 1), (2, 2), (3, 1)):
        calls.open(call(identifier, peer=peer))
    assert calls.peers() == {1, 2}
    assert {c.id for c in calls.close_all(peer=1)} == {1, 3}
    assert calls.peers() == {2}


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.floats(0, 10), st.booleans()), max_size=40),
    st.lists(st.floats(0, 20), max_size=10),
)
def test_every_call_ends_exactly_once(plan, looks):
    calls, ended = PendingCalls(), []
    for identifier, (timeout, now, answered) in enumerate(sorted(plan, key=lambda step: step[1])):
        calls.open(call(identifier, timeout=timeout, now=now))
        if answered:
            ended.append(calls.close(identifier).id)
            assert calls.close(identifier) is None
    for now in sorted(looks):
        expired = calls.expire(now)
        assert all(c.deadline <= now for c in expired)
        ended += [c.id for c in expired]
    ended += [c.id for c in calls.close_all()]
    assert sorted(ended) == list(range(len(plan)))
    assert len(calls) == 0


def test_bytes_are_those_of_the_calls_that_are_pending():
    calls = PendingCalls()
    for number in range(5):
        calls.open(call(number))
    first, second, third, *_ = calls.now()
    calls.sent(first, 100)
    calls.sent(third, 30)
    calls.close(second.id)
    calls.sent(second, 1000)  # it was answered before its sender came to note its size
    assert calls.bytes == 130
    calls.close(first.id)
    assert calls.bytes == 30
    calls.close_all()
    assert calls.bytes == 0


def test_who_waits_for_room_learns_of_the_next_call_with_a_size_that_leaves():
    calls = PendingCalls()
    for number in range(3):
        calls.open(call(number))
    small, *large = calls.now()
    for one in large:
        calls.sent(one, 100)
    assert calls.leaving(200) is None
    leaving = calls.leaving(150)
    assert calls.leaving(150) is leaving
    calls.close(small.id)
    assert not leaving.done()
    calls.close(large[0].id)
    assert leaving.done()
    assert calls.leaving(150) is None
    last = calls.leaving(50)
    assert not last.done()
    calls.expire(1e9)
    assert last.done()
