"""The choice of the thread that looks for messages: one at a time, preferably a thread that waits anyway.

Every switch of the GIL between threads costs more than a message does. Therefore:

* A thread that waits for an answer looks for it itself. If several threads wait, one looks and the others sleep until
  their answers have come, or until the looking thread leaves with its own answer and wakes one of them to look.
* Otherwise the *primary* of the serving threads looks. It runs the task that a message brings on its own stack, without
  a handover, and is no longer primary while the task runs. It stops looking while a thread that waits looks; a thread
  whose task has waited looks again as soon as the task is done.
* A *standby* wakes every millisecond (after a quiet time every four) and becomes primary if there is none: a call that
  runs long delays the next call once, by that time at most, and no call can keep others from being served.
* Where the system starts no more threads, the primary hands tasks on and goes on looking.
* While other threads may compute, the primary looks the less often the longer it has found no task: a thread that is
  woken takes more from computing threads than its look takes. Where messages ring, it sleeps for ``tick_seconds``.

The baton is a lock held while looking, never while a task runs. Threads only try to take it; ``stop`` alone waits for
it.
"""

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.threads import IDLE_SECONDS, join_soon, run_task, started
from jdistgrad.wire.interrupts import is_put_off, put_off_interrupt
from jdistgrad.wire.polling import LONGEST, WITH_BELL, nap, pause
from jdistgrad.wire.transport import Receiver, Task

Look = Callable[[], tuple[bool, Task | None]]

INTERRUPT_SECONDS = 0.02  # how often the main thread wakes to see whether Ctrl-C was pressed

log = logging.getLogger("jdistgrad.wire")


class Progress:
    """The threads that call ``look`` and run the tasks it returns.

    Arguments:
      look: looks for messages once, without waiting; returns whether anything moved, and at most one task to run.
      receiver: its callbacks are called: ``tick`` about every ``tick_seconds``, and ``fail`` when ``look`` has raised;
        no thread looks for messages after that.
      sleep: sleeps for at most so many seconds, while there is nothing to look for.
      rung: returns whether all that this process has to look for ends such a sleep.
    """

    def __init__(
        self,
        name: str,
        look: Look,
        receiver: Receiver,
        *,
        sleep: Callable[[float], None] = pause,
        rung: Callable[[], bool] = lambda: False,
        tick_seconds: float = 0.005,
    ):
        self._name, self._look, self._receiver = name, look, receiver
        self._rest, self._rung, self._tick_seconds = sleep, rung, tick_seconds
        self._baton, self._primary = threading.Lock(), threading.Lock()
        self._standby, self._count = threading.Semaphore(0), itertools.count()
        # The threads that sleep, the latest last; each entry is removed once, by the waker or the thread.
        self._asleep: dict[concurrent.futures.Future[None], None] = {}
        self._free = self._parked = self._busy = 0
        self._counting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.last_activity = self._last_task = self._next_tick = time.monotonic()
        self._last_wait, self._last_waiter = 0.0, 0
        self._stopped = False
        self.idle_process = False  # True: nothing else in this process needs the GIL, so the primary may spin

    def start(self) -> None:
        with self._counting:
            self._one_more()

    def stop(self) -> None:
        """Stop looking for messages; return when no thread looks any more. Tasks that run may go on."""
        self._stopped = True
        while self._wake():
            pass
        self._baton.acquire()  # never released
        with self._counting:
            self._standby.release(self._parked + 1)
        join_soon(self._threads)

    # Waiting for an answer, on any thread.

    def wait_for(self, futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None) -> None:
        done = futures[0].done if len(futures) == 1 else lambda: any(future.done() for future in futures)
        if done():
            return
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while not (done() or self._stopped or time.monotonic() >= deadline):
            with put_off_interrupt() as interrupt:
                if self._baton.acquire(blocking=False):
                    self._last_wait, self._last_waiter = float("inf"), threading.get_ident()
                    try:
                        self._look_until(lambda: done() or interrupt.seen, deadline)
                    finally:
                        self._last_wait = time.monotonic()
                        self._give_back()
                else:
                    self._sleep(futures, deadline)
            if interrupt.seen and is_put_off():
                return

    def look(self) -> None:
        """Look once, unless another thread does. Whoever looks between computations will look again soon."""
        with put_off_interrupt():
            if not self._stopped and self._baton.acquire(blocking=False):
                try:
                    _, task = self._look_safely()
                finally:
                    self._last_wait, self._last_waiter = time.monotonic(), threading.get_ident()
                    self._give_back()
                if task is not None:
                    self._receiver.run(task)

    def _sleep(self, futures: Sequence[concurrent.futures.Future[Any]], deadline: float) -> None:
        """Sleep while another thread looks, until an answer has come or this thread is woken to look, or shorter."""
        called: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._asleep[called] = None
        longest = INTERRUPT_SECONDS if threading.current_thread() is threading.main_thread() else threading.TIMEOUT_MAX
        seconds = min(longest, deadline - time.monotonic())
        if self._baton.locked() and not self._stopped and seconds > 0:  # else nobody may wake this thread
            concurrent.futures.wait((*futures, called), seconds, concurrent.futures.FIRST_COMPLETED)
        self._asleep.pop(called, None)

    def _wake(self) -> bool:
        """Wake the latest sleeper; return whether there was one."""
        if not self._asleep:
            return False
        try:
            called, _ = self._asleep.popitem()
        except KeyError:  # the last sleeper has just left
            return False
        called.set_result(None)
        return True

    def _give_back(self) -> bool:
        """Stop looking, and wake a sleeper to look; return whether there was a sleeper.

        If that sleeper has its answer by now, the primary will wake the next.
        """
        self._baton.release()
        return self._wake()

    def _look_until(self, done: Callable[[], bool], deadline: float) -> None:
        quiet_since = now = time.monotonic()
        while not (done() or self._stopped or now >= deadline):
            moved, task = self._look_safely()
            if task is not None:
                self._receiver.run(task)
            now = time.monotonic()
            if moved:
                quiet_since = now
            else:
                self._rest(min(self._nap(now - quiet_since, may_spin=True), deadline - now))

    # Serving threads.

    def _one_more(self) -> None:
        """Let one more thread serve; the caller holds ``_counting``. Raises RuntimeError if none can be started."""
        if self._parked:
            self._parked -= 1
            self._standby.release()
        else:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(started(self._serve, f"{self._name}-{next(self._count)}"))
        self._free += 1

    def _has_standby(self) -> bool:
        """Return whether another thread can be primary while the primary runs a task; provide it if need be.

        The caller holds ``_counting``.
        """
        if self._free < 2:
            try:
                self._one_more()
            except RuntimeError:  # the pool says so, when it is handed a task
                return False
        return True

    def _serve(self) -> None:
        self._receiver.enter_thread()
        while not self._stopped:
            task = self._be_primary() if self._primary.acquire(blocking=False) else None
            if task is not None:
                self._run_here(task)
                del task  # it may hold a call's values
            elif not self._stand_by():
                return

    def _be_primary(self) -> Task | None:
        """Look until there is a task to run, and return it; or None as soon as another thread looks."""
        try:
            self._tick_if_due()
            if self._another_looks():
                return None
            with self._counting:
                self._has_standby()
            while not (self._stopped or self._another_looks()):
                task = self._look_once()
                self._tick_if_due()
                if task is not None and self._leaves_to_run():
                    return task
                if task is not None:
                    self._receiver.run(task)
            return None
        finally:
            self._primary.release()

    def _leaves_to_run(self) -> bool:
        """Leave the looking to another thread; return False if there is none.

        The next primary must count this thread as busy, and the other must not park meanwhile: a thread that waits for
        an answer may look just now, and nobody would after it.
        """
        with self._counting:
            if not self._has_standby():
                return False
            self._free -= 1
            self._busy += 1
            return True

    def _another_looks(self) -> bool:
        """Return whether a thread that waits for an answer is looking, or will be soon."""
        return time.monotonic() - self._last_wait < LONGEST

    def _look_once(self) -> Task | None:
        if not self._baton.acquire(blocking=False):
            pause(LONGEST)
            return None
        try:
            moved, task = self._look_safely()
        finally:
            called = self._give_back()
        now = time.monotonic()
        if called:
            self._last_wait = now
        if task is not None:
            self._last_task = now
        if moved:
            self.last_activity = now
            return task
        if self.idle_process and not self._busy:
            seconds = self._nap(now - self.last_activity, may_spin=True)
        else:  # spinning would take the GIL, and a core, from a task that runs
            seconds = self._nap(now - self._last_task, may_spin=False)
        self._rest(self._tick_seconds if seconds and self._rung() else seconds)
        return task

    def _nap(self, quiet: float, *, may_spin: bool) -> float:
        return nap(quiet, may_spin=may_spin, longer=WITH_BELL if self._rung() else 1)

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
            self._next_tick = now + self._tick_seconds
            try:
                self._receiver.tick(now)
            except Exception:  # without this thread no call would be served
                log.exception("housekeeping of %s failed", self._name)

    def _stand_by(self) -> bool:
        """Wait until this thread may be needed; return False if it has not been for a while."""
        with self._counting:
            surplus = self._free > (1 if self._another_looks() else 2) and not self._stopped
            if surplus:
                self._free -= 1
                self._parked += 1
        if not surplus:
            pause(max(LONGEST, nap(time.monotonic() - self._last_task, may_spin=False)))  # the bell is for the primary
        elif not self._standby.acquire(timeout=IDLE_SECONDS):
            with self._counting:
                if not self._standby.acquire(blocking=False):  # nobody has woken this thread just now
                    self._parked -= 1
                    return False
        return True

    def _run_here(self, task: Task) -> None:
        run_task(task, self._name)
        with self._counting:
            self._free += 1
            self._busy -= 1
        self.last_activity = time.monotonic()
        if self._last_waiter == threading.get_ident():  # it will not wait again soon
            self._last_wait = 0.0
