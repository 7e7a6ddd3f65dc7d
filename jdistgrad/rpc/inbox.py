"""Inboxes: values that workers push to each other inside a scope, each under a key that both sides know.

A pushed value needs no answer, and may come before anybody asks for it. The thread that moves messages only puts it
away; the thread that takes it opens it, since opening may run code of users' classes.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.errors import ContextError
from jdistgrad.rpc.layouts import Key

Opener = Callable[[], tuple[Key, Any]]
Wait = Callable[[Sequence[concurrent.futures.Future[Any]]], None]


class Inbox:
    """The pushed values that one worker has received in one scope and nobody has taken."""

    def __init__(self) -> None:
        self._unopened: list[Opener] = []
        self._values: dict[Key, Any] = {}
        self._waiting: list[concurrent.futures.Future[Any]] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._unopened) + len(self._values)

    def arrived(self, opener: Opener) -> None:
        """Put a value away; the ``opener`` returns its key and the value, or raises."""
        with self._lock:
            self._unopened.append(opener)
            waiting, self._waiting = self._waiting, []
        _wake(waiting)

    def take(self, key: Key, look: Callable[[], None], wait: Wait) -> Any:
        """Remove and return the value with this key.

        Arguments:
          look: delivers what has arrived and not been delivered: mostly the value is there, and nobody need wait.
          wait: returns when a future of those it is given is done.

        Raises:
          BaseException: ``wait`` has raised, the scope has ended, or a value could not be opened.
        """
        if key not in self._values and not self._unopened:
            look()
        while True:
            with self._lock:
                try:
                    self._open_all()
                except BaseException as error:
                    self._error = self._error or error
                if key in self._values:
                    return self._values.pop(key)
                if self._error is not None:
                    raise self._error
                something = concurrent.futures.Future[Any]()
                self._waiting.append(something)
            try:
                wait((something,))
            finally:
                with self._lock:
                    self._waiting = [one for one in self._waiting if one is not something]

    def close(self) -> None:
        """Forget the values, and fail everybody who waits for one."""
        self.give_up(ContextError("the context was closed while a value was being waited for"))
        with self._lock:
            self._unopened.clear()
            self._values.clear()

    def give_up(self, error: BaseException) -> None:
        """Fail everybody who waits for a value that has not come, now and later."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, []
        _wake(waiting)

    def _open_all(self) -> None:
        while self._unopened:
            key, value = self._unopened.pop()()
            self._values[key] = value


def _wake(waiting: list[concurrent.futures.Future[Any]]) -> None:
    for one in waiting:
        one.set_result(None)
