"""The pool of threads that serve calls, also where no more threads can be started."""

import subprocess
import sys
import threading
import time

import pytest
from helpers.starving import feed, no_more_threads, starve
from helpers.worlds import on_worker0

import jdistgrad as jd
from jdistgrad import threads
from jdistgrad.threads import ThreadPool


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def test_tasks_that_wait_for_each_other_all_run():
    pool, barrier = ThreadPool("together"), threading.Barrier(101)
    for _ in range(100):
        pool.run(barrier.wait)
    barrier.wait(20)
    pool.close()


def test_idle_threads_have_ended_when_the_pool_is_closed():
    pool, done = ThreadPool("idle"), threading.Barrier(4)

    class Slow:
        def __del__(self):
            time.sleep(0.02)  # as JAX takes its time to free the arrays of a thread

    local = threading.local()

    def task():
        local.held = Slow()
        done.wait()

    for _ in range(3):
        pool.run(task)
    done.wait(20)
    pool.close()
    assert threads_of("idle") == []


def test_a_busy_thread_keeps_nobody_and_ends_after_its_task():
    pool, go_on = ThreadPool("busy"), threading.Event()
    pool.run(go_on.wait)
    pool.close()
    (thread,) = threads_of("busy")
    go_on.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_task_may_close_its_own_pool():
    pool, closed = ThreadPool("own"), threading.Event()
    pool.run(lambda: (pool.close(), closed.set()))
    assert closed.wait(20)


def test_a_thread_that_is_stopped_between_two_tasks_ends_without_a_word(monkeypatch, capsys):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's own, not pytest's
    monkeypatch.setattr(threads, "STOP_SECONDS", 0.1)
    pool = ThreadPool("stopped")
    (thread,) = threads_of("stopped")
    threads.stop([thread])
    pool.close()
    thread.join(20)
    assert not thread.is_alive()
    assert capsys.readouterr().err == ""


def test_a_failing_task_ends_no_thread(caplog):
    pool, done = ThreadPool("failing"), threading.Event()
    pool.run(lambda: 1 / 0)
    pool.run(done.set)
    assert done.wait(20)
    pool.close()
    assert "a task of failing failed outside of any call" in caplog.text


def test_threads_that_have_nothing_to_do_end_but_for_one(monkeypatch):
    monkeypatch.setattr(threads, "IDLE_SECONDS", 0.02)
    pool = ThreadPool("fewer")
    for _ in range(3):
        barrier = threading.Barrier(9)
        for _ in range(8):
            pool.run(barrier.wait)
        barrier.wait(20)
        until(lambda: [thread.name for thread in threads_of("fewer")] == ["fewer-0"])
    pool.close()
    assert threads_of("fewer") == []


def test_tasks_for_which_no_thread_can_be_started_wait_for_one_that_is_free(caplog):
    pool, go_on, done = ThreadPool("starved"), threading.Event(), []
    with no_more_threads():
        pool.run(go_on.wait)
        for k in range(3):
            pool.run(lambda k=k: done.append((k, threading.current_thread().name)))
        assert done == []
        go_on.set()
        until(lambda: len(done) == 3)
    assert done == [(k, "starved-0") for k in range(3)]
    assert caplog.text.count("starved has 1 threads and can start no more (can't start new thread; see ulimit -u") == 1
    pool.close()


def test_tasks_that_waited_run_as_soon_as_threads_can_be_started():
    pool, barrier = ThreadPool("fed"), threading.Barrier(4)
    with no_more_threads():
        for _ in range(3):
            pool.run(barrier.wait)
        pool.resume()
    pool.resume()
    barrier.wait(20)
    pool.close()


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def nap_and_add(seconds, x, y):
    time.sleep(seconds)
    return x + y


@pytest.mark.world(1, 3)
@on_worker0
def test_calls_for_which_there_is_no_thread_are_served_later(world):
    peers = range(jd.world_size())
    for peer in peers:
        jd.rpc_sync(peer, starve)
    try:
        futures = [jd.rpc_async(peer, nap_and_add, args=(0.02, peer, k)) for k in range(5) for peer in peers]
        seen = []
        for future in futures:
            future.add_done_callback(lambda future: seen.append(future.result()))
        values = [jd.remote(peer, nap_and_add, args=(0.02, peer, 100)) for peer in peers]
        expected = [peer + k for k in range(5) for peer in peers]
        assert [future.result(20) for future in futures] == expected
        assert [value.to_here() for value in values] == [peer + 100 for peer in peers]
        until(lambda: sorted(seen) == sorted(expected))
    finally:
        feed()
        for peer in peers:
            jd.rpc_sync(peer, feed)


LOOKING = """
import gc, threading, time
from jdistgrad.threads import frames

def start_threads():
    while not done.is_set():
        threading.Thread(target=int).start()

done = threading.Event()
starter = threading.Thread(target=start_threads)
starter.start()
gc.callbacks.append(lambda phase, info: time.sleep(0.0001))
gc.set_threshold(1)
for _ in range(300):
    assert threading.get_ident() in frames()
done.set()
starter.join()
print(gc.isenabled())
gc.disable()
frames()
print(gc.isenabled())
"""


def test_frames_of_threads_are_found_while_others_start_and_garbage_is_collected():
    """Without care, Python 3.11 stands still within the first hundred."""
    asked = subprocess.run([sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=100, check=True)
    assert asked.stdout.split() == ["True", "False"]


COMPUTING = """
import _thread, threading
import jax, jax.numpy as jnp
import jdistgrad as jd

begun = threading.Barrier(3)

def compute():
    x = jnp.ones((200, 200))
    begun.wait()
    while True:
        x = jax.jit(lambda x: jnp.sin(x @ x))(x)
"""

SERVED = """
workers = jd.local_workers(3)
for rank in (1, 2):
    jd.rpc_async(rank, compute)
begun.wait()
raise ValueError("mine")
"""

INTERRUPTED = """
def main():
    if jd.init().rank == 2:
        begun.wait()
        _thread.interrupt_main()
    else:
        compute()

jd.spawn(main, 3)
"""


LIMITED = """
import signal

def limit(*_):
    raise TimeoutError("of mine")

def main():
    if jd.init().rank == 2:
        begun.wait()
        signal.raise_signal(signal.SIGALRM)
    else:
        compute()

signal.signal(signal.SIGALRM, limit)
try:
    jd.spawn(main, 3)
finally:
    assert not [one.name for one in threading.enumerate() if one.name.startswith("rank")]
"""


@pytest.mark.parametrize(
    ("program", "status", "last"),
    [
        (SERVED, 1, "ValueError: mine"),
        (INTERRUPTED, -2, "KeyboardInterrupt"),
        (LIMITED, 1, "TimeoutError: of mine"),
    ],
)
def test_a_program_ends_as_it_says_while_its_workers_compute(program, status, last):
    """Threads that come back from compiled code while Python ends would abort the process."""
    program = COMPUTING + program
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == status
    assert ended.stderr.rstrip().endswith(last)
