"""Worlds whose workers are threads: spawned, in a notebook, and of one worker."""

import concurrent.futures
import operator
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from helpers.worlds import nap

import jdistgrad as jd
from jdistgrad.rpc.worker import current_worker
from jdistgrad.threads import usable_cores
from jdistgrad.wire.polling import poll


def test_spawn_raises_what_a_main_raised_and_nobody_hangs():
    others = []

    def main():
        me = jd.init()
        if me.rank == 1:
            time.sleep(0.3)
            raise ValueError("boom")
        try:
            jd.rpc_sync(1, nap, args=(30,))
        except jd.WorkerLostError as error:
            others.append(str(error))
            raise

    with pytest.raises(ValueError, match="boom") as caught:
        jd.spawn(main, 3)
    assert "raised by the main of rank 1 of spawn" in caught.value.__notes__
    assert poll(lambda: len(others) == 2, 10)
    assert all("the main of rank 1 failed: ValueError: boom" in text for text in others)


def test_spawn_notices_a_missing_shutdown_or_init():
    with pytest.raises(jd.WorldError):
        jd.spawn(jd.init, 2)

    def main():
        if threading.current_thread().name == "rank0":
            jd.init(timeout=0.3)
            jd.shutdown()

    with pytest.raises(jd.WorldError, match=r"ranks \[1, 2\] of a local world of 3 did not call init within 0\.3 s"):
        jd.spawn(main, 3)


@pytest.mark.parametrize("n", [0, -1, 1.5, "3"])
def test_a_world_needs_a_whole_number_of_workers(n):
    for start in (lambda: jd.spawn(jd.init, n), lambda: jd.local_workers(n)):
        with pytest.raises(ValueError, match="workers"):
            start()


def test_local_workers_for_a_notebook():
    captured = 5
    with jd.local_workers(3) as local:
        assert [worker.name for worker in local.workers] == ["worker0", "worker1", "worker2"]
        assert jd.worker_info().rank == 0
        assert jd.rpc_sync("worker2", lambda x: x + captured, args=(1,)) == 6
        array = jnp.ones(1000)
        assert jd.rpc_sync(1, lambda x: x, args=(array,)) is array
        devices = [jd.rpc_sync(worker, lambda: jnp.zeros(3).devices()) for worker in local.workers]
        assert devices == [{device} for device in jax.local_devices()[:3]]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # any thread of the process is worker 0
            assert pool.submit(jd.worker_info).result().rank == 0
    with pytest.raises(jd.NotInitializedError):
        jd.worker_info()


def test_what_a_notebook_compiles_is_of_a_world_of_this_size():
    traced = []

    @jax.jit
    def ask_last(x):
        traced.append(jd.world_size())
        return jd.rpc_sync(jd.world_size() - 1, lambda x: x + jd.rank(), args=(x,))

    for size in (2, 3, 2, 1, 3):
        with jd.local_workers(size):
            assert int(ask_last(jnp.zeros((), int))) == size - 1
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                assert int(pool.submit(ask_last, jnp.zeros((), int)).result()) == size - 1
    assert sorted(traced) == [1, 2, 3]


def test_a_collective_that_only_the_notebook_calls():
    """The others have no program that could come to it: the error says how they call it too."""
    said = r"worker1 .*has no program, and only serves calls.*jd.rpc_all"
    with jd.local_workers(3), pytest.raises(jd.WorkerLostError, match=said):
        jd.DataParallel().mean(1.0)
    with jd.local_workers(3) as local:
        assert [*jd.rpc_all(local.workers, mean_of_ranks).result()] == [1, 1, 1]


def mean_of_ranks():
    return float(jd.DataParallel().mean(float(jd.rank())))


def test_a_worker_of_a_local_world_opens_no_other():
    def main():
        for _ in range(2):  # before its world, and after it
            with pytest.raises(jd.AlreadyInitializedError):
                jd.local_workers(3)
            jd.init()
            jd.shutdown()

    jd.spawn(main, 3)


def test_local_workers_last_until_they_are_closed():
    local = jd.local_workers(2)
    with pytest.raises(jd.AlreadyInitializedError):
        jd.local_workers(2)
    local.close()
    local.close()
    again = jd.local_workers(2)
    jd.shutdown()
    again.close()


def wait_for_one(wait):
    jd.rpc_sync(1, wait)


def wait_for_a_value(wait):
    jd.remote(1, wait).to_here()


def wait_for_tasks(wait):
    list(jd.map(lambda _: wait(), range(2), workers=[1, 2]))


@pytest.mark.parametrize("waits", [wait_for_one, wait_for_a_value, wait_for_tasks])
def test_an_interrupted_wait_leaves_the_world_usable(waits):
    """Ctrl-C in a notebook sends SIGINT to the process, whose main thread waits or is about to wait."""
    released = threading.Event()
    with jd.local_workers(3):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        late = threading.Timer(20, released.set)
        late.start()
        with pytest.raises(KeyboardInterrupt):
            waits(released.wait)
        assert not released.is_set()
        assert jd.rpc_sync(1, nap, args=(0,)) == 0
        late.cancel()
        released.set()


def test_a_system_that_does_not_tell_a_process_its_cores(monkeypatch):
    for missing in ("sched_getaffinity", "pidfd_open"):
        monkeypatch.delattr(os, missing)

    def main():
        me = jd.init()
        jd.barrier()
        answer = jd.rpc_sync((me.rank + 1) % 3, abs, args=(-me.rank,))
        jd.shutdown()
        return answer

    assert jd.spawn(main, 3) == [0, 1, 2]
    assert len(usable_cores()) == os.cpu_count()


def test_compiled_calls_of_two_worlds_at_a_time_stay_in_their_worlds():
    tags, meet = {}, threading.Barrier(6)

    def tagged(x):
        return x + tags[current_worker().world]

    @jax.jit
    def compiled(x):
        return jd.rpc_sync(1, tagged, args=(x,))

    @jd.jit
    def staged(x):
        return jd.rpc_sync(1, tagged, args=(x,))

    def main(tag):
        jd.init()
        tags[current_worker().world] = tag
        meet.wait(30)
        found = [float(step(jnp.ones(()))) for step in (compiled, staged) for _ in range(2)]
        meet.wait(30)
        jd.shutdown()
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda tag: jd.spawn(main, 3, args=(tag,)), (10, 20)))
    assert found == [[[11.0] * 4] * 3, [[21.0] * 4] * 3]


def test_a_served_function_that_outlives_its_world_calls_no_other_one():
    begun, opened, found = threading.Barrier(3), threading.Event(), concurrent.futures.Future()
    step = jax.jit(lambda x: jd.rpc_sync(1, operator.neg, args=(x,)))

    def late():
        begun.wait(30)
        opened.wait(30)
        try:
            found.set_result(step(jnp.ones(())))
        except Exception as error:
            found.set_exception(error)

    def leaves():
        rank = jd.init().rank
        step(jnp.ones(()))
        if rank == 0:
            jd.rpc_async(1, late)
        begun.wait(30)
        jd.shutdown(graceful=False)

    def stays():
        jd.init()
        step(jnp.ones(()))
        opened.set()
        with pytest.raises(Exception, match="this world has been shut down"):
            found.result(30)
        jd.shutdown()

    jd.spawn(leaves, 2)
    jd.spawn(stays, 2)


def jitted_double():
    """Return a jitted function, and the list of what it has been traced with."""
    traced = []

    @jax.jit
    def double(x):
        traced.append(x)
        return 2 * x

    return double, traced


def test_worlds_whose_mains_fail_are_closed_and_share_what_is_compiled():
    (double, traced), workers, meet = jitted_double(), [], threading.Barrier(2)

    def main():
        jd.init()
        workers.append(current_worker())
        double(jnp.ones(()))
        meet.wait(30)
        raise ValueError("here")

    for _ in range(3):
        with pytest.raises(ValueError, match="here"):
            jd.spawn(main, 2)
    assert len(traced) == 2
    assert all(worker.closed for worker in workers)
