"""Who looks for messages, with a queue in place of a network."""

import concurrent.futures
import queue
import threading

import pytest

from jdistgrad.wire.progress import Progress


class Mailbox:
    """Tasks in, looked for as a transport would; counts how many look at once."""

    def __init__(self):
        self.tasks = queue.SimpleQueue()
        self.failures = []
        self.ticks = 0
        self.lookers = 0
        self.most_lookers = 0
        self.broken = None
        self.progress = Progress(
            "test", self.look, run=self.run, enter=lambda: None, tick=self.tick, fail=self.failures.append
        )
        self.progress.start()

    def look(self):
        self.lookers += 1
        self.most_lookers = max(self.most_lookers, self.lookers)
        try:
            if self.broken is not None:
                raise self.broken
            return True, self.tasks.get_nowait()
        except queue.Empty:
            return False, None
        finally:
            self.lookers -= 1

    def run(self, task):
        threading.Thread(target=task, daemon=True).start()

    def tick(self, now):
        self.ticks += 1

    def future(self):
        """A future that a task will complete, once somebody looks."""
        future = concurrent.futures.Future()
        self.tasks.put(lambda: future.set_result(threading.current_thread().name))
        return future


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.progress.stop()


def test_tasks_run_without_anybody_waiting(mailbox):
    futures = [mailbox.future() for _ in range(200)]
    assert all(future.result(30) for future in futures)
    assert mailbox.most_lookers == 1


def test_who_waits_looks_and_runs_nothing_itself(mailbox):
    for _ in range(200):
        future = mailbox.future()
        mailbox.progress.wait_for((future,), 30)
        assert future.result(0) != threading.current_thread().name
    assert mailbox.most_lookers == 1


def test_many_waiters_and_one_baton(mailbox):
    def waiter(k):
        for _ in range(50):
            future = mailbox.future()
            mailbox.progress.wait_for((future,), 30)
            future.result(0)
        return k

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(waiter, range(6))) == list(range(6))
    assert mailbox.most_lookers == 1


def test_a_task_that_waits_for_the_next_does_not_stop_the_next(mailbox):
    """As deep as one likes: each task is done only when the one after it has run."""
    depth, done = 40, [threading.Event() for _ in range(41)]
    for k in range(depth):
        mailbox.tasks.put(lambda k=k: (done[k + 1].wait(30), done[k].set()))
    mailbox.tasks.put(done[depth].set)
    assert done[0].wait(30)


def test_waiting_ends_with_its_time(mailbox):
    never = concurrent.futures.Future()
    mailbox.progress.wait_for((never,), 0.05)
    assert not never.done()
    future = mailbox.future()
    assert future.result(30)  # the baton was given back


def test_housekeeping_goes_on_while_somebody_waits(mailbox):
    mailbox.progress.wait_for((concurrent.futures.Future(),), 0.1)
    assert mailbox.ticks > 2


def test_a_broken_transport_is_told(mailbox, caplog):
    error = mailbox.broken = RuntimeError("the network is gone")
    future = concurrent.futures.Future()
    mailbox.progress.wait_for((future,), 5)
    assert not future.done()
    assert mailbox.failures == [error]
    assert "the network is gone" in caplog.text


def test_nobody_looks_after_the_end():
    box = Mailbox()
    box.progress.stop()
    future = box.future()
    threading.Event().wait(0.05)
    assert not future.done()
