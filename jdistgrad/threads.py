"""An unbounded pool of reusable daemon threads, which serve calls.

A call may wait for another that waits for a third that needs this worker: any fixed number of threads can deadlock.
``concurrent.futures.ThreadPoolExecutor`` bounds its threads, and joins them when the interpreter ends.
"""

import collections
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

IDLE_LIMIT = 64

log = logging.getLogger("jdistgrad.threads")


class ThreadPool:
    """A pool that starts every task at once, on a thread of its own. ``enter`` runs first in every new thread."""

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None):
        self._name, self._enter = name, enter
        self._idle: collections.deque[queue.SimpleQueue[Any]] = collections.deque()
        self._count = itertools.count()
        self._closed = False

    def run(self, task: Callable[[], Any]) -> None:
        try:
            inbox = self._idle.pop()  # the most recently used
        except IndexError:
            inbox = self._spawn()
        inbox.put(task)

    def close(self) -> None:
        """End the idle threads; busy threads end after their task."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _spawn(self) -> queue.SimpleQueue[Any]:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        name = f"{self._name}-{next(self._count)}"
        threading.Thread(target=self._work, args=(inbox,), name=name, daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[Any]) -> None:
        self._enter()
        while (task := inbox.get()) is not None:
            try:
                task()
            except BaseException:
                log.exception("a task of %s failed outside of any call", self._name)
            del task  # an idle thread must not keep a call's arrays alive
            if len(self._idle) >= IDLE_LIMIT:
                return
            self._idle.append(inbox)
            if self._closed:
                self.close()
