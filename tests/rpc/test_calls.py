"""Calls: targets, nested calls, many calls at once, calls from several threads."""

import concurrent.futures
import contextvars
import threading

import numpy as np
import pytest
from helpers.programs import square
from helpers.worlds import on_worker0, peers, wire_world as wire_world

import jdistgrad as jd
from jdistgrad.rpc.current import current_scope

pytestmark = pytest.mark.world(1, 3)


def who():
    return jd.worker_info()


@on_worker0
def test_a_target_is_a_name_a_rank_or_an_info(world):
    last = jd.world_size() - 1
    expected = jd.WorkerInfo(last, f"worker{last}")
    for to in (last, f"worker{last}", expected, np.int64(last)):
        assert jd.rpc_sync(to, who) == expected


def leave_in_a_context():
    jd.context().__enter__()


def scope_here():
    return current_scope() is None


@on_worker0
def test_a_function_that_leaves_its_thread_in_a_context_leaves_no_later_call_there(big_world):
    jd.rpc_sync(1, leave_in_a_context)
    assert all(jd.rpc_sync(1, scope_here) for _ in range(20))


def bounce(path):
    """Call the next worker of a path; return the ranks of the workers that ran, in order."""
    if not path:
        return [jd.worker_info().rank]
    return [jd.worker_info().rank, *jd.rpc_sync(path[0], bounce, args=(path[1:],))]


@on_worker0
def test_deep_recursion_between_two_workers(big_world):
    """The recursion is deeper than any thread pool of fixed size."""
    path = [1 + k % 2 for k in range(150)]
    assert jd.rpc_sync(2, bounce, args=(path,)) == [2, *path]


@on_worker0
def test_hundreds_in_flight_from_several_threads(world):
    def caller(offset):
        futures = [jd.rpc_async(peer, square, args=(offset + k,)) for k in range(100) for peer in peers()]
        return sum(future.result() for future in futures)

    offsets = (0, 1000, 2000)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        sums = [pool.submit(contextvars.copy_context().run, caller, offset) for offset in offsets]
        expected = [len(peers()) * sum((offset + k) ** 2 for k in range(100)) for offset in offsets]
        assert [s.result() for s in sums] == expected


everybody = threading.Barrier(8)
released = threading.Event()


def meet():
    everybody.wait(30)
    return jd.worker_info().rank


@on_worker0
def test_slow_calls_to_one_worker_overlap(world):
    """Each of eight calls ends only when all eight are running."""
    futures = [jd.rpc_async(peers()[-1], meet) for _ in range(8)]
    assert {future.result() for future in futures} == {peers()[-1]}


def wait_for_release():
    return released.wait(30)


@on_worker0
def test_a_busy_worker_still_serves(world):
    """A call ends only when a later call has been served."""
    released.clear()
    slow = jd.rpc_async(peers()[-1], wait_for_release)
    for k in range(50):
        assert jd.rpc_sync(peers()[-1], square, args=(k,)) == k * k
    assert not slow.done()
    jd.rpc_sync(peers()[-1], released_set)
    assert slow.result()


def released_set():
    released.set()


hits = []


def hit(chain):
    hits.append(len(chain))
    if chain:
        jd.rpc_async(chain[0], hit, args=(chain[1:],))


def test_shutdown_waits_for_calls_nobody_waits_for(world):
    """Each of 20 calls makes the next call without waiting for it; shutdown returns after the last call."""
    hits.clear()

    def main():
        me = jd.init()
        if me.rank == 0:
            hit([k % world.size for k in range(1, 21)])
        jd.shutdown()
        return me.rank

    ranks = world.run(main)
    assert sorted(hits) == sorted(20 - k for k in range(21) if k % world.size in ranks)
