"""The choice of the thread that looks for messages, with a queue in place of a network."""

import concurrent.futures
import functools
import os
import queue
import signal
import threading
import time
import types

import pytest
from helpers.starving import no_more_threads

from jdistgrad.wire import mpi_progress
from jdistgrad.wire.doorbell import AWAKE, SERVES, WAITS
from jdistgrad.wire.mpi_progress import Probing, Progress
from jdistgrad.wire.transport import Transport


class Bell:
    """A doorbell of one process."""

    def __init__(self):
        self.shown = AWAKE
        self.rung = {WAITS: threading.Event(), SERVES: threading.Event()}
        self.asleep = set()

    def show(self, bell):
        self.shown = bell

    def sleep(self, bell, seconds, unless=lambda: False):
        if not unless():
            self.asleep.add(bell)
            self.rung[bell].wait(seconds)
        self.asleep.discard(bell)
        self.rung[bell].clear()

    def ring_own(self, bell):
        if self.shown & bell:
            self.rung[self.shown & bell].set()


class Mailbox:
    """A queue of tasks in place of a transport; counts the threads that look at the same time.

    Arguments:
      rings: whether there is a bell, which ``come`` rings.
    """

    def __init__(self, *, rings=False, **how):
        self.tasks = queue.SimpleQueue()
        self.failures = []
        self.ticks, self.third_tick = 0, concurrent.futures.Future()
        self.lookers = 0
        self.most_lookers = 0
        self.looks = 0
        self.stopped = False
        self.seen = set()  # the threads that have looked
        self.broken = None
        self.bell, self.rings = Bell(), rings
        receiver = types.SimpleNamespace(run=self.run, enter_thread=int, tick=self.tick, fail=self.failures.append)
        rung = {"came": lambda: not self.tasks.empty(), "rings": lambda: self.rings}
        self.progress = Progress("test", self.look, receiver, self.bell, **rung, **how)
        self.wait = self.progress.wait
        self.progress.start()

    wait_for = Transport.wait_for

    def come(self, task):
        """Let a message come, with a ring."""
        self.tasks.put(task)
        self.bell.ring_own(WAITS | SERVES)

    def look(self):
        self.lookers += 1
        self.looks += 1
        self.seen.add(threading.get_ident())
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

    def stop(self):
        if not self.stopped:
            self.stopped = True
            self.progress.stop()

    def tick(self, now):
        self.ticks += 1
        if self.ticks == 3:
            self.third_tick.set_result(None)

    def future(self):
        """Return a future that a queued task completes once a thread looks."""
        future = concurrent.futures.Future()
        self.tasks.put(lambda: future.set_result(threading.current_thread().name))
        return future


@pytest.fixture
def mailbox():
    box = Mailbox()
    yield box
    box.stop()


def test_threads_that_are_not_needed_any_more_end(mailbox, monkeypatch):
    monkeypatch.setattr(mpi_progress, "IDLE_SECONDS", 0.02)
    for _ in range(3):
        barrier = threading.Barrier(9)
        for _ in range(8):
            mailbox.tasks.put(barrier.wait)
        barrier.wait(30)
        until(lambda: serving_threads() <= 3)
    assert mailbox.future().result(30)


def test_without_a_standby_the_primary_hands_tasks_on(mailbox):
    handed_on, begun, go_on = queue.SimpleQueue(), threading.Event(), threading.Event()
    mailbox.future().result(30)  # primary and standby are there
    mailbox.progress._receiver.run = handed_on.put
    with no_more_threads():
        mailbox.tasks.put(lambda: (begun.set(), go_on.wait()))
        assert begun.wait(30)
        futures = [mailbox.future() for _ in range(3)]
        for _ in futures:
            handed_on.get(timeout=30)()
        assert len({future.result(30) for future in futures}) == 1
        go_on.set()


@pytest.fixture
def belled(monkeypatch):
    """Yield a mailbox whose threads sleep until they are rung for, however long that takes."""
    monkeypatch.setattr(mpi_progress, "LONGEST_SLEEP", 3600.0)
    box = Mailbox(rings=True, tick_seconds=3600.0)
    yield box
    box.stop()


def test_where_messages_ring_a_serving_thread_looks_when_it_is_rung_for(belled):
    until(lambda: belled.bell.asleep == {SERVES} and belled.bell.shown == SERVES)
    looks, answer = belled.looks, concurrent.futures.Future()
    belled.come(lambda: answer.set_result(1))
    assert answer.result(30)
    assert belled.looks > looks


def test_a_thread_that_waits_sleeps_until_it_is_rung_for_and_leaves_the_bell_to_the_serving_thread(belled):
    until(lambda: belled.bell.asleep == {SERVES})
    answer, answer_of_a_call = concurrent.futures.Future(), concurrent.futures.Future()
    waiter = threading.Thread(target=belled.wait_for, args=((answer,), 60))
    waiter.start()
    until(lambda: belled.bell.asleep == {SERVES, WAITS} and belled.bell.shown == WAITS)
    belled.come(lambda: answer.set_result(1))
    waiter.join(30)
    assert not waiter.is_alive()
    belled.come(lambda: answer_of_a_call.set_result(1))
    assert answer_of_a_call.result(30)


def test_what_comes_after_the_last_look_of_a_thread_that_waited_wakes_the_serving_thread(belled):
    """It came while the thread showed that it looks, so nobody has rung."""
    until(lambda: belled.bell.asleep == {SERVES})
    late, look = concurrent.futures.Future(), belled.progress._look

    def last_look():
        found = look()
        belled.tasks.put(lambda: late.set_result(1))
        belled.progress._look = look
        return found

    belled.progress._look = last_look
    belled.progress.look()
    assert late.result(30)


def test_who_completes_an_answer_itself_wakes_the_thread_that_waits(belled):
    answer = concurrent.futures.Future()
    waiter = threading.Thread(target=belled.wait_for, args=((answer,), 60))
    waiter.start()
    until(lambda: belled.bell.shown == WAITS)
    answer.set_result(1)
    belled.bell.ring_own(WAITS)
    waiter.join(30)
    assert not waiter.is_alive()


class Stuck(Mailbox):
    """A transfer is under way that does not end: each look says that something moves."""

    def look(self):
        self.looks += 1
        return True, None


def test_a_transfer_that_does_not_end_keeps_nobody_from_housekeeping_nor_a_wait_from_ending():
    box = Stuck()
    try:
        never = concurrent.futures.Future()
        box.third_tick.result(30)
        box.wait_for((never,), 0.05)
        assert not never.done()
    finally:
        box.stop()


def test_many_who_wait_look_one_at_a_time_and_run_nothing_themselves(mailbox):
    def waiter(k):
        for _ in range(50):
            future = mailbox.future()
            mailbox.wait_for((future,), 30)
            assert future.result(0) != threading.current_thread().name
        return k

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(waiter, range(6))) == list(range(6))
    assert mailbox.most_lookers == 1


class Asked(concurrent.futures.Future):
    """A future that counts the calls of ``done``."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def done(self):
        self.count += 1
        return super().done()


class AnsweredWhenWoken(Asked):
    """A future whose answer comes at the moment its waiter is woken to look."""

    def done(self):
        if self.count == 2:
            self.set_result(1)
        return super().done()


@pytest.fixture
def waiting(mailbox):
    """Yield a function that starts a thread that waits for a future of its own. The first of these threads looks."""
    threads, futures = [], []

    def start(kind=Asked):
        futures.append(kind())
        threads.append(threading.Thread(target=mailbox.wait_for, args=(futures[-1:], 60)))
        threads[-1].start()
        until(lambda: threads[-1].ident in mailbox.seen if len(threads) == 1 else futures[-1].count >= 2)
        return threads[-1], futures[-1]

    yield start
    for future in futures:
        if not future.done():
            future.set_result(None)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_while_one_looks_the_others_sleep_until_their_own_answers_come(mailbox, waiting):
    looker, _ = waiting()
    woken, before = [waiting() for _ in range(20)], mailbox.looks
    until(lambda: mailbox.looks > before + 300)
    assert max(future.count for _, future in woken) <= 3
    for _, future in woken:
        mailbox.tasks.put(functools.partial(future.set_result, 1))
    for thread, _ in woken:
        thread.join(30)
        assert not thread.is_alive()
    assert looker.is_alive()


def test_who_has_its_answer_calls_another_to_look(mailbox, waiting):
    futures = {thread.ident: future for thread, future in [waiting() for _ in range(4)]}
    for looked in range(1, 4):
        (looker,) = (one for one, future in futures.items() if one in mailbox.seen and not future.done())
        mailbox.tasks.put(functools.partial(futures[looker].set_result, 1))
        until(lambda count=looked: len(mailbox.seen & futures.keys()) == count + 1)


def test_who_is_called_to_look_and_has_its_answer_calls_the_next(mailbox, waiting):
    """The latest waiter is woken first, and has its answer by then."""
    first, last, _ = waiting(), waiting(), waiting(AnsweredWhenWoken)
    mailbox.tasks.put(functools.partial(first[1].set_result, 1))
    until(lambda: last[0].ident in mailbox.seen)


def test_an_interrupt_wakes_the_main_thread(mailbox, waiting):
    """The main thread sleeps while another thread looks."""
    waiting()
    never = Asked()
    presser = threading.Thread(target=lambda: (until(lambda: never.count >= 2), os.kill(os.getpid(), signal.SIGINT)))
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        mailbox.wait_for((never,), 30)
    presser.join()


@pytest.mark.parametrize("how", ["ends", "breaks"])
def test_sleepers_wake_when_the_transport_goes(waiting, mailbox, how, caplog):
    threads = [waiting()[0] for _ in range(5)]
    if how == "ends":
        mailbox.stop()
    else:
        mailbox.broken = RuntimeError("the network is gone")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert mailbox.failures == ([mailbox.broken] if how == "breaks" else [])
    assert ("the network is gone" in caplog.text) == (how == "breaks")
    late = mailbox.future()
    threading.Event().wait(0.05)
    assert not late.done()  # nobody looks any more


def test_a_task_that_waits_for_the_next_does_not_stop_the_next(mailbox):
    """Tasks may wait for each other at any depth: each of these is done only when the task after it has run."""
    depth, done = 40, [threading.Event() for _ in range(41)]
    for k in range(depth):
        mailbox.tasks.put(lambda k=k: (done[k + 1].wait(30), done[k].set()))
    mailbox.tasks.put(done[depth].set)
    assert done[0].wait(30)


def test_a_thread_that_is_slow_to_begin_its_task_is_not_counted_on(mailbox):
    """Counted as free, it would keep the next from starting a third, and nobody would look while the two wait."""
    run, first, second_runs, done = mailbox.progress._run_here, iter([True]), threading.Event(), threading.Event()

    def begin(task):
        if next(first, False):
            second_runs.wait(30)
        run(task)

    mailbox.progress._run_here = begin
    mailbox.tasks.put(lambda: done.wait(30))
    mailbox.tasks.put(lambda: (second_runs.set(), done.wait(30)))
    mailbox.tasks.put(done.set)
    assert done.wait(30)


def test_waiting_ends_with_its_time(mailbox):
    never = concurrent.futures.Future()
    mailbox.wait_for((never,), 0.05)
    assert not never.done()
    future = mailbox.future()
    assert future.result(30)  # the baton was given back


def end_the_thread():
    raise SystemExit(3)


def serving_threads():
    return sum(thread.name.startswith("test-") for thread in threading.enumerate())


def test_tasks_that_fail_take_no_thread_along(mailbox, caplog):
    before = mailbox.future().result(30) and serving_threads()
    for _ in range(50):
        mailbox.tasks.put(end_the_thread)
        assert mailbox.future().result(30)
    assert serving_threads() < before + 25  # some are late to return, on a busy machine
    assert "outside of any call" in caplog.text


def test_housekeeping_that_fails_goes_on(mailbox, caplog):
    def fail(now):
        mailbox.tick(now)
        raise RuntimeError("a broom broke")

    mailbox.progress._receiver.tick = fail
    third = mailbox.third_tick
    mailbox.wait_for((third,), None)
    assert third.done()
    assert mailbox.future().result(30)
    assert "a broom broke" in caplog.text


def test_a_second_long_task_does_not_delay_the_third(belled):
    """The standby, which looks every hour here, is woken as the second begins."""
    until(lambda: belled.bell.asleep == {SERVES})
    done, third = threading.Event(), concurrent.futures.Future()
    belled.progress._needed.release()  # in place of the tick after which the first is known to run long
    for task in (done.wait, done.wait, lambda: third.set_result(1)):
        belled.come(task)
        until(belled.tasks.empty)
    assert third.result(30)
    done.set()


@pytest.mark.parametrize(
    ("took", "seconds"), [(10e-6, 50e-6), (100e-6, 200e-6), (700e-6, 1e-3), (3e-3, 50e-6), (1.0, 50e-6)]
)
def test_probing_takes_twice_as_long_as_answers_take_unless_they_take_too_long_to_probe_for(took, seconds):
    probing = Probing()
    for _ in range(500):
        probing.learn(took)
    assert probing.seconds == pytest.approx(seconds, rel=0.05)
