"""Callbacks of calls: what runs when an answer has come, on a thread that may wait, while the worker counts as busy."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.mailbox import Mailbox


class UnderWay(NamedTuple):
    """The callbacks of one call, which run, and when they began."""

    call: Pending
    since: float


class Callbacks:
    """The callbacks that run on a worker. The world stays open for them: they may call other workers."""

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self._by_thread: dict[int, UnderWay] = {}

    def start(self, call: Pending, run: Callable[[], Any]) -> None:
        """Run the callbacks of a call on another thread."""
        self._mailbox.run(self._mailbox.work.counted(functools.partial(self._run, [(call, run)])))

    def on_this_thread(self) -> bool:
        return threading.get_ident() in self._by_thread

    def now(self) -> list[UnderWay]:
        """Return what runs, longest first."""
        return list(self._by_thread.values())

    def _run(self, todo: list[tuple[Pending, Callable[[], Any]]]) -> None:
        """Run callbacks. When this returns, nothing here refers to the answer any more, which may hold references."""
        call, run = todo.pop()
        self._by_thread[threading.get_ident()] = UnderWay(call, time.monotonic())
        try:
            run()
        finally:
            del self._by_thread[threading.get_ident()], call, run
