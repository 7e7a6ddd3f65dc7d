"""Shutdowns that wait: warnings, and the error after a timeout, name the workers and calls that are waited for."""

import concurrent.futures
import contextlib
import contextvars
import functools
import threading
import time

import pytest
from helpers.worlds import last, on_worker0

import jdistgrad as jd
from jdistgrad.rpc import closing
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.polling import poll

released = [threading.Event() for _ in range(4)]
promised = []


def wait_here():
    return released[jd.worker_info().rank].wait(30)


def promise():
    future = concurrent.futures.Future()
    promised.append(future)
    if released[jd.worker_info().rank].is_set():
        release()
    return future


def release():
    released[jd.worker_info().rank].set()
    with contextlib.suppress(IndexError):
        while True:
            promised.pop().set_result(7)


def until_two_are_served():
    """Wait until this worker serves this call and one more."""
    assert poll(lambda: len(current_worker().running) > 1, 20)


@pytest.fixture
def said(caplog, monkeypatch):
    """Return a function that waits for a text in the log. Workers warn after 0.1 s."""
    monkeypatch.setattr(closing, "SPEAK_SECONDS", 0.1)
    for one in released:
        one.clear()

    def wait(text, times=1):
        assert poll(lambda: caplog.text.count(text) >= times, 30), f"{text!r} was not logged, but {caplog.text!r}"

    return wait


@pytest.fixture
def beside():
    """Yield a function that runs work on another thread of the same worker."""
    threads, failures = [], []

    def start(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        threads.append(threading.Thread(target=contextvars.copy_context().run, args=(run,)))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("function", [wait_here, promise], ids=["a thread that waits", "a future"])
def test_who_serves_a_call_for_long_is_named_with_its_function(big_world, said, beside, function):
    """All workers have called shutdown, so they wait for the call only."""
    name = f"{function.__module__}.{function.__qualname__}"

    def end_when_said():
        try:
            said(f" s for worker2 (rank 2), which serves {name}, called by worker1 (rank 1) ")
        finally:
            jd.rpc_sync(2, release)

    def main():
        me = jd.init()
        if me.rank == 1:
            jd.rpc_async(2, function)
        if me.rank == 0:
            beside(end_when_said)
        jd.shutdown()

    big_world.run(main)


@pytest.mark.parametrize("late", [0, 2])
def test_who_has_not_called_shutdown_is_named_by_the_lowest_that_has(big_world, said, beside, caplog, late):
    """Worker 0 conducts the shutdown, but another worker warns if worker 0 is late. Only one worker warns."""
    speaker, third = (0, 1) if late else (1, 2)
    text = f"for worker{late} (rank {late}), which has not called shutdown"

    def release_one_by_one():
        try:
            said(text)
            jd.rpc_sync(third, release)
            said(text, times=2)
        finally:
            jd.rpc_sync(late, release)

    def main():
        me = jd.init()
        if me.rank == speaker:
            beside(release_one_by_one)
        else:
            assert wait_here()
        jd.shutdown()

    big_world.run(main)
    spoken = [record.getMessage() for record in caplog.records if text in record.getMessage()]
    assert all(f"shutdown of worker{speaker} (rank {speaker}): waiting" in one for one in spoken)


@pytest.mark.parametrize("impatient", [0, 1])
def test_who_gives_up_says_for_which_functions_it_waited(big_world, said, impatient):
    """Any worker can name the calls: a worker that does not conduct the shutdown asks the others for reports itself."""

    def main():
        me = jd.init()
        if me.rank == impatient:
            jd.rpc_async(2, wait_here)
            jd.rpc_sync(2, until_two_are_served)
            text = rf"waited 0\.3 s for .*worker2 \(rank 2\), which .*serves .*wait_here, called by worker{impatient} "
            with pytest.raises(jd.CallTimeoutError, match=text):
                jd.shutdown(timeout=0.3)
            jd.rpc_sync(2, release)
        jd.shutdown()

    big_world.run(main)


def test_workers_of_a_notebook_do_not_say_that_they_wait(said, caplog):
    """Workers of a notebook only serve: a long wait in shutdown is normal for them, so they do not warn."""
    with jd.local_workers(3):
        time.sleep(0.5)
        assert jd.rpc_sync(2, release) is None
    assert caplog.text == ""


def test_a_world_stays_open_while_a_thread_returns_what_was_dropped():
    """The thread gets no core between taking note of the weights and sending them, while the workers are surveyed."""
    surveyed, slow = threading.Event(), threading.Event()

    def main():
        me = jd.init()
        if me.rank == 0:
            references, closing = current_worker().references, current_worker().closing
            dropped = references.dropped

            def pausing():
                found = dropped()
                if found:
                    slow.set()
                    if poll(lambda: closing.told_to_close.is_set() or closing._round > 5, 30):
                        surveyed.set()
                return found

            made = jd.remote(1, abs, args=(-1,))
            made.to_here()
            references.dropped = pausing
            del made
            assert slow.wait(30)
        return jd.shutdown()

    assert jd.spawn(main, 3) == [[], [], []]
    assert surveyed.is_set()


def add_then(future, callback):
    future.then(callback)


def add_callback(future, callback):
    future.add_done_callback(lambda done: callback(done.result()))


@pytest.mark.parametrize("add", [add_then, add_callback])
def test_shutdown_waits_for_callbacks_and_for_what_they_call(world, add):
    done = []

    def call_on(worker, shared):
        assert poll(lambda: worker.closing.wanted, 20)
        time.sleep(0.1)
        done.append(jd.rpc_sync(last(), length, args=(shared.to_here(),)))

    def main():
        if jd.init().rank == 0:
            add(jd.rpc_async(last(), shared_zeros), functools.partial(call_on, current_worker()))
            assert jd.shutdown() == []
            assert done == [3]
        else:
            jd.shutdown()

    world.run(main)


def shared_zeros():
    time.sleep(0.1)
    return jd.RRef([0, 0, 0])


def length(items):
    return len(items)


def shut_down():
    jd.shutdown()


@on_worker0
def test_nothing_that_shutdown_waits_for_can_wait_for_it(big_world):
    with pytest.raises(jd.WorldError):
        jd.rpc_async(2, shared_zeros).then(lambda shared: jd.shutdown()).result(20)
    for rank in range(3):
        with pytest.raises(jd.WorldError):
            jd.rpc_sync(rank, shut_down, timeout=20)
