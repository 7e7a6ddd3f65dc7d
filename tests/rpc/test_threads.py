"""The pool of threads that serve calls, also where no more threads can be started."""

import subprocess
import sys
import threading
import time

import pytest
from helpers.starving import feed, starve
from helpers.worlds import on_worker0

import jdistgrad as jd
from jdistgrad import threads
from jdistgrad.threads import ThreadPool
from jdistgrad.wire.polling import poll


def threads_of(name):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


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
        assert poll(lambda: [thread.name for thread in threads_of("fewer")] == ["fewer-0"], 20)
    pool.close()
    assert threads_of("fewer") == []


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
        assert poll(lambda: sorted(seen) == sorted(expected), 20)
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


@pytest.mark.parametrize(
    ("program", "status", "last"), [(SERVED, 1, "ValueError: mine"), (INTERRUPTED, -2, "KeyboardInterrupt")]
)
def test_a_program_ends_as_it_says_while_its_workers_compute(program, status, last):
    """Threads that come back from compiled code while Python ends would abort the process."""
    program = COMPUTING + program
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == status
    assert ended.stderr.rstrip().endswith(last)
