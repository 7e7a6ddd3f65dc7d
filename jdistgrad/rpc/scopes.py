"""Scopes: data that several workers keep under one id, until the worker that opened the scope closes it.

Every call made inside a scope carries its id. A worker that receives such a call takes part: it keeps data in the scope
(the layers above decide which) and passes the id on with its own calls. Closing reaches all workers that take part.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jdistgrad.errors import ContextError, WorkerLostError
from jdistgrad.wire.message import ids_of, spell, worker_of

T = TypeVar("T")

Key = tuple[int, ...]  # of a pushed value

REMEMBERED = 4096  # closed scopes, so that late messages get the right error


class Scope:
    """A worker's part of a scope.

    Attributes:
      error: why what is missing in the scope will never come, or None.
    """

    def __init__(self, identifier: int):
        self.id = identifier
        self.closed = False
        self._peers: set[int] = set()
        self._contents: dict[Any, Any] = {}
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def content(self, make: Callable[[], T]) -> T:
        """Return a layer's object in the scope: one for each ``make``, made on first use and closed with the scope."""
        with self._lock:
            if self.closed:
                raise closed_error(self.id)
            if make not in self._contents:
                self._contents[make] = make()
                if self.error is not None:
                    self._contents[make].give_up(self.error)
            content: T = self._contents[make]
            return content

    def includes(self, peer: int) -> None:
        """Note that a call goes to this peer, which must then be notified when the scope closes."""
        with self._lock:
            if self.closed:
                raise closed_error(self.id)
            self._peers.add(peer)

    def peers(self) -> set[int]:
        with self._lock:
            return set(self._peers)

    def give_up(self, error: BaseException) -> None:
        """Fail everything that waits in the scope, now and later: a worker that took part is lost."""
        with self._lock:
            self.error = self.error or error
            contents = list(self._contents.values())
        for content in contents:
            content.give_up(self.error)

    def close(self) -> tuple[set[int], list[Any]]:
        """Close the scope; return the peers to notify, and the contents for the caller to close."""
        with self._lock:
            self.closed = True
            peers, contents = self._peers, list(self._contents.values())
            self._peers, self._contents = set(), {}
            return peers, contents


class ScopeTable:
    """The scopes one worker takes part in.

    Attributes:
      ids: of new scopes, which can be entered, and be released whether they have been entered or not.
      open: those that are open, by id.
      lost: the lost workers: nobody can enter a scope that one has opened, nor one that is new here in a call of one.
    """

    def __init__(self, rank: int):
        self.ids = ids_of(rank)
        self.open: dict[int, Scope] = {}
        self._closed: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.lost: set[int] = set()
        self._rank, self._lock = rank, threading.Lock()

    def lose(self, lost: int) -> list[int]:
        """Let nobody enter a scope of a lost worker from now on; return the closed scopes that this worker opened."""
        with self._lock:
            self.lost.add(lost)
            return [one for one in self._closed if worker_of(one) == self._rank]

    def enter(self, identifier: int, caller: int | None = None) -> Scope:
        """Return the scope with this id, made if it is new here.

        Arguments:
          caller: the worker in whose call the id has come. If it is lost, this worker would not be notified of the end
            of a scope that is new here.

        Raises:
          ContextError: the scope has been closed.
          WorkerLostError: it is not open here, and its opener or the caller is lost.
        """
        with self._lock:
            scope = self.open.get(identifier)
            if scope is None:
                if identifier in self._closed:
                    raise closed_error(identifier)
                for peer in self.lost & {worker_of(identifier), caller}:
                    raise WorkerLostError(
                        f"context {spell(identifier)} cannot be entered: the worker of rank {peer}, from which it "
                        "came, is lost.",
                        worker=peer,
                        context=identifier,
                    )
                scope = self.open[identifier] = Scope(identifier)
            return scope

    def find(self, identifier: int) -> Scope:
        """Return a scope that must be open here. Raises ContextError if it is not."""
        scope = self.open.get(identifier)
        if scope is not None:
            return scope
        if identifier in self._closed:
            raise closed_error(identifier)
        raise ContextError(
            f"there is no context {spell(identifier)} on this worker: no call made in it has come here. Use the object "
            "that `with jdistgrad.context() as ctx` gives.",
            context=identifier,
        )

    def release(self, identifier: int) -> Scope | None:
        """Remove and return a scope, or None if it is not here. It cannot be entered again."""
        with self._lock:
            self._closed[identifier] = None
            if len(self._closed) > REMEMBERED:
                self._closed.popitem(last=False)
            return self.open.pop(identifier, None)

    def identifiers(self) -> list[int]:
        with self._lock:
            return list(self.open)


def closed_error(identifier: int) -> ContextError:
    return ContextError(
        f"context {spell(identifier)} has been closed. Calls, gradients and optimizer steps that use it belong inside "
        "its `with jdistgrad.context()` block.",
        context=identifier,
    )


Opener = Callable[[], tuple[Key, Any]]
Wait = Callable[[Sequence[concurrent.futures.Future[Any]]], None]


class Inbox:
    """The pushed values that one worker has received in one scope, by keys that both sides know, until they are taken.

    A pushed value needs no answer, and may come before it is asked for. The thread that moves messages only stores it;
    the thread that takes it opens it, since opening may run code of users' classes.
    """

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
        for one in waiting:
            one.set_result(None)

    def take(self, key: Key, look: Callable[[], None], wait: Wait) -> Any:
        """Remove and return the value with this key.

        Arguments:
          look: delivers what has arrived and not been delivered: mostly the value is there, without a wait.
          wait: returns when a future of those it is given is done.

        Raises:
          BaseException: ``wait`` has raised, the scope has ended, or a value could not be opened.
        """
        if key not in self._values and not self._unopened:
            look()
        while True:
            with self._lock:
                try:
                    while self._unopened:
                        found, value = self._unopened.pop()()
                        self._values[found] = value
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
        for one in waiting:
            one.set_result(None)
