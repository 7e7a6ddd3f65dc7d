"""The pool of threads that serve calls."""

import threading
import time

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


def test_a_failing_task_ends_no_thread(caplog):
    pool, done = ThreadPool("failing"), threading.Event()
    pool.run(lambda: 1 / 0)
    pool.run(done.set)
    assert done.wait(20)
    pool.close()
    assert "a task of failing failed outside of any call" in caplog.text
