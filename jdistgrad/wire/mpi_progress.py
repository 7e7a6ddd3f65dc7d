"""The choice of the thread that looks for messages: one at a time, preferably a thread that waits anyway.

Every switch of the GIL between threads costs more than a message does. Therefore:

* A thread that waits for an answer looks for it itself. If several threads wait, one looks and the others sleep until
  their answers have come, or until the looking thread leaves with its own answer and wakes one of them.
* While nobody waits, the *primary* of the serving threads sleeps until its bell rings (``doorbell``), looks, and runs
  the task that a message brings on its own stack, without a handover. While another thread looks, the primary sleeps
  on; also for a millisecond after a thread that waits often: waking in between would take Python's lock from it.
* A *standby* looks every ``tick_seconds`` whether there is a primary, and becomes primary if not: a call that runs long
  delays the next call once, by that time at most. If a call runs already, the standby is woken before the next begins.
* Where the system starts no more threads, the primary hands tasks on and keeps looking.

A looking thread probes for as long as good answers take (``Probing``), and then sleeps until a bell rings. The baton is
a lock held while looking, never while a task runs. Threads only try to take it; ``stop`` alone waits for it.
"""

import concurrent.futures
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable

from jdistgrad.threads import IDLE_SECONDS, join_soon, run_task, started
from jdistgrad.wire import interrupts
from jdistgrad.wire.doorbell import AWAKE, SERVES, WAITS, Doorbell
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.polling import nap, pause
from jdistgrad.wire.transport import Awaited, Receiver, Task

Look = Callable[[], tuple[bool, Task | None]]

TICK_SECONDS = 0.005
IDLE_TICKS = 10  # the factor between ticks where no messages come
IDLE_AFTER = 0.5  # seconds without a message
SOON = 1e-3  # a thread that waits again within this time waits often
IDLE_SOON = 0.02  # seconds without a message, after which the primary checks less often whether it is to look
LONGEST_SLEEP = 0.005  # of a thread that waits: what other threads of this process do rings no bell
INTERRUPT_SECONDS = 0.02  # how often the main thread wakes to check for Ctrl-C

log = logging.getLogger("jdistgrad.wire")


class Probing:
    """How long to probe before sleeping: twice as long as good answers take, if that is short enough.

    Sleeping costs the other side a system call, and this one the time to wake up: 20 to 200 us.
    """

    SHORTEST, LONGEST, TOO_LONG = 50e-6, 1e-3, 2e-3
    FASTER, SLOWER = 1 / 4, 1 / 64  # weights of an answer that took less than the usual time, and more

    def __init__(self) -> None:
        self._usual = 100e-6

    @property
    def seconds(self) -> float:
        if self._usual >= self.TOO_LONG:
            return self.SHORTEST
        return min(max(2 * self._usual, self.SHORTEST), self.LONGEST)

    def learn(self, took: float) -> None:
        """Update the usual time with how long an answer took."""
        weight = self.FASTER if took < self._usual else self.SLOWER
        self._usual += weight * (min(took, 2 * self.TOO_LONG) - self._usual)


class Progress:
    """The threads that call ``look`` and run the tasks it returns.

    Arguments:
      look: looks for messages once, without waiting; returns whether anything moved, and at most one task to run.
      receiver: its ``tick`` is called about every ``tick_seconds``, and ``fail`` when ``look`` has raised; no thread
        looks for messages after that.
      bell: wakes the threads.
      came: returns whether there is something that the last look has not found.
      rings: returns whether everything that this process has to look for rings.
    """

    def __init__(
        self,
        name: str,
        look: Look,
        receiver: Receiver,
        bell: Doorbell,
        *,
        came: Callable[[], bool],
        rings: Callable[[], bool],
        tick_seconds: float = TICK_SECONDS,
    ):
        self._name, self._look, self._receiver = name, look, receiver
        self._bell, self._came, self._rings, self._tick_seconds = bell, came, rings, tick_seconds
        self._baton, self._primary = threading.Lock(), threading.Lock()
        self._parking, self._needed = threading.Semaphore(0), threading.Semaphore(0)
        self._count = itertools.count()
        # The sleeping threads, the latest last; each entry is removed once, by the waker or the thread.
        self._asleep: dict[concurrent.futures.Future[None], None] = {}
        self._free = self._parked = self._busy = 0
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._answers, self._calls = Probing(), Probing()
        self._last_message = self._last_end = self._next_tick = time.monotonic()
        self._left = self._expected = 0.0  # when a thread that waited has left, and until when it may look again
        self._stopped = False
        self.idle_process = False  # True: nothing else in this process needs the GIL, so the primary may probe

    def start(self) -> None:
        with self._counting:
            self._one_more()

    def stop(self) -> None:
        """Stop looking for messages; return when no thread looks any more. Tasks that run may go on."""
        self._stopped = True
        while self._wake():
            pass
        self._bell.ring_own(WAITS)
        self._bell.ring_own(SERVES)
        self._baton.acquire()  # never released
        with self._counting:
            self._parking.release(self._parked + 1)
            self._needed.release(len(self._threads))
        join_soon(self._threads)

    # Waiting for an answer, on any thread.

    def wait(self, target: Awaited, deadline: float = math.inf) -> None:
        """See ``Transport.wait``."""
        called = False
        while not (target.done or self._stopped or interrupts.has_come() or time.monotonic() >= deadline):
            if self._baton.acquire(blocking=False):
                often = time.monotonic() - self._left < SOON
                try:
                    self._look_until(target, deadline)
                finally:
                    self._give_back(often=often)
            else:
                called = self._sleep(target, deadline)
        if called:  # another one must look
            self._wake()

    def look(self) -> None:
        """Look once, unless another thread does."""
        with put_off_interrupt():
            if not self._stopped and self._baton.acquire(blocking=False):
                often = time.monotonic() - self._left < SOON
                try:
                    _, task = self._look_safely()
                finally:
                    self._give_back(often=often)
                if task is not None:
                    self._receiver.run(task)

    def _sleep(self, target: Awaited, deadline: float) -> bool:
        """Sleep while another thread looks, at most until the answer is here; return whether to look now."""
        called: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._asleep[called] = None
        longest = INTERRUPT_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
        seconds = min(longest, deadline - time.monotonic())
        if self._baton.locked() and not self._stopped and seconds > 0:  # else nobody may wake this thread
            concurrent.futures.wait((*target.futures(), called), seconds, concurrent.futures.FIRST_COMPLETED)
        self._asleep.pop(called, None)
        return called.done()

    def _wake(self) -> bool:
        """Wake the latest sleeper; return whether there was one."""
        try:
            called, _ = self._asleep.popitem()
        except KeyError:
            return False
        called.set_result(None)
        return True

    def _give_back(self, *, often: bool) -> None:
        """Stop looking, and wake a sleeper to look, or the primary if messages have come since the last look.

        ``often``: this thread will look again soon, so the primary leaves messages to it.
        """
        if not often:
            self._bell.show(SERVES)
        self._left = time.monotonic()
        self._expected = self._left + SOON if often else 0.0
        self._baton.release()
        if not self._wake() and not often and self._came():
            self._bell.ring_own(SERVES)

    def _look_until(self, target: Awaited, deadline: float) -> None:
        self._bell.show(AWAKE)
        start = quiet_since = time.monotonic()
        probing = self._answers.seconds
        while not (target.done or self._stopped or (interrupts.pending and interrupts.has_come())):
            moved, task = self._look_safely()
            if task is not None:
                self._receiver.run(task)
            now = time.monotonic()
            if now >= deadline:
                return
            if moved:
                self._last_message = quiet_since = now
            elif now - quiet_since >= probing:
                longest = min(LONGEST_SLEEP, deadline - now)
                if self._rings():
                    self._bell.show(WAITS)
                    self._bell.sleep(WAITS, longest, lambda: target.done or self._came())
                    self._bell.show(AWAKE)
                else:
                    pause(min(nap(now - quiet_since), longest))
        self._answers.learn(time.monotonic() - start)

    # Serving threads.

    def _one_more(self) -> None:
        """Add a serving thread; the caller holds ``_counting``. Raises RuntimeError if none can be started."""
        if self._parked:
            self._parked -= 1
            self._parking.release()
        else:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(started(self._serve, f"{self._name}-{next(self._count)}"))
        self._free += 1

    def _serve(self) -> None:
        self._receiver.enter_thread()
        while not self._stopped:
            task = self._be_primary() if self._primary.acquire(blocking=False) else None
            if task is not None:
                self._run_here(task)
                del task  # which may hold a call's values
            elif not self._stand_by():
                return

    def _be_primary(self) -> Task | None:
        """Look until there is a task to run, and return the task; None if the transport is closed."""
        try:
            while not self._stopped:
                self._tick_if_due()
                task = self._look_for_task()
                if task is not None and self._leaves_to_run():
                    return task
                if task is not None:
                    self._receiver.run(task)
            return None
        finally:
            self._primary.release()

    def _look_for_task(self) -> Task | None:
        """Look while messages come, then sleep; return the first task. While another thread looks, only sleep."""
        now = time.monotonic()
        if now < self._expected or not self._baton.acquire(blocking=False):
            longest = SOON if now - self._last_message < IDLE_SOON else math.inf
            self._bell.sleep(SERVES, max(0.0, min(longest, self._next_tick - now)))
            return None
        self._bell.show(AWAKE)
        task, quiet_since = None, max(self._last_message, self._last_end)
        probing = self._calls.seconds if self.idle_process and not self._busy else 0.0
        try:
            while task is None and not (self._asleep or self._stopped):
                moved, task = self._look_safely()
                now = time.monotonic()
                if moved:
                    self._last_message = quiet_since = now
                if now >= self._next_tick or now - quiet_since >= probing:
                    break
        finally:
            self._bell.show(AWAKE if task is not None else SERVES)  # the standby looks at its next tick
            self._baton.release()
            called = self._wake()
        if task is not None:
            self._calls.learn(self._last_message - self._last_end)
        elif not called:
            longest = max(0.0, self._next_tick - time.monotonic())
            if self._rings():
                self._bell.sleep(SERVES, longest, self._came)
            else:
                pause(min(nap(now - quiet_since), longest))
        return task

    def _look_safely(self) -> tuple[bool, Task | None]:
        try:
            return self._look()
        except Exception as error:
            self._stopped = True
            log.exception("%s cannot look for messages any more", self._name)
            self._receiver.fail(error)
            while self._wake():
                pass
            return False, None

    def _tick_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_tick:
            idle = now - self._last_message > IDLE_AFTER
            self._next_tick = now + self._tick_seconds * (IDLE_TICKS if idle else 1)
            try:
                self._receiver.tick(now)
            except Exception:  # without this thread no call would be served
                log.exception("housekeeping of %s failed", self._name)

    def _leaves_to_run(self) -> bool:
        """Leave the looking to another thread, started if need be; return False if there is none."""
        with self._counting:  # the next primary must count this thread as busy, and the other must not park meanwhile
            if self._free < 2:
                try:
                    self._one_more()
                except RuntimeError:  # the pool logs it, when it is handed a task
                    return False
            self._free -= 1
            self._busy += 1
            return True

    def _run_here(self, task: Task) -> None:
        if self._busy > 1:  # this task may run long too
            self._needed.release()
        run_task(task, self._name)
        with self._counting:
            self._free += 1
            self._busy -= 1
        self._last_end = time.monotonic()

    def _stand_by(self) -> bool:
        """Wait until this thread may be needed; return False if it has not been for a while."""
        with self._counting:
            surplus = self._free > 2 and not self._stopped
            if surplus:
                self._free -= 1
                self._parked += 1
        if not surplus:
            self._needed.acquire(timeout=max(self._tick_seconds, self._next_tick - time.monotonic()))
        elif not self._parking.acquire(timeout=IDLE_SECONDS):
            with self._counting:
                if not self._parking.acquire(blocking=False):  # nobody has woken this thread just now
                    self._parked -= 1
                    return False
        return True
