"""Users' callbacks, which run when an answer has come or a worker is lost: on a thread that may wait, as work."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jdistgrad.rpc.mailbox import Mailbox

CALL, ON_LOST = "a call", "on_lost"


class UnderWay(NamedTuple):
    """Callbacks that run.

    Attributes:
      of: what they are callbacks of: ``CALL`` or ``ON_LOST``.
      function: the function that was called, or the callback of ``on_lost``.
      peer: the rank of the worker that has answered, or is lost.
      since: when they began.
    """

    of: str
    function: Callable[..., Any]
    peer: int
    since: float


class Callbacks:
    """The callbacks that run on a worker. The world stays open for them: they may call other workers."""

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self._by_thread: dict[int, UnderWay] = {}

    def start(self, of: str, function: Callable[..., Any], peer: int, run: Callable[[], Any]) -> None:
        """Run callbacks on another thread."""
        self._mailbox.run(self._mailbox.work.counted(functools.partial(self._run, of, function, peer, [run])))

    def here(self) -> UnderWay | None:
        """Return the callbacks that this thread runs, if any."""
        return self._by_thread.get(threading.get_ident())

    def now(self) -> list[UnderWay]:
        """Return what runs, longest first."""
        return list(self._by_thread.values())

    def _run(self, of: str, function: Callable[..., Any], peer: int, todo: list[Callable[[], Any]]) -> None:
        """Run callbacks. When this returns, nothing here refers to the answer any more, which may hold references."""
        run = todo.pop()
        self._by_thread[threading.get_ident()] = UnderWay(of, function, peer, time.monotonic())
        try:
            run()
        finally:
            del self._by_thread[threading.get_ident()], run
