"""The interface of transports, which move messages without interpreting them, and of the worker that they call."""

import concurrent.futures
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt
from jdistgrad.wire.message import Message

Task = Callable[[], None]
Futures = Sequence[concurrent.futures.Future[Any]]

_ending = threading.Lock()  # shared: a lock for each would cost more than it ever waits


@dataclasses.dataclass(slots=True, eq=False)
class Ending:
    """An event that messages complete. It makes a future only for a thread that sleeps meanwhile."""

    done: bool = dataclasses.field(default=False, init=False)
    _sleeper: InterruptibleFuture[None] | None = dataclasses.field(default=None, init=False)

    def end(self) -> None:
        with _ending:
            self.done, sleeper, self._sleeper = True, self._sleeper, None
        if sleeper is not None:
            sleeper.set_result(None)

    def futures(self) -> Futures:
        with _ending:
            future = self._sleeper = self._sleeper or InterruptibleFuture()
        if self.done:
            self.end()
        return (future,)


class FirstOf:
    """The event that the first of some futures is done."""

    def __init__(self, futures: Futures):
        self._futures = futures

    @property
    def done(self) -> bool:
        return any(future.done() for future in self._futures)

    def futures(self) -> Futures:
        return self._futures


# What a thread waits for: it looks for messages until ``done``, or sleeps until one of the ``futures`` is done.
Awaited = Ending | FirstOf
Receiver = Any  # the ``Worker``, of a layer above


class Transport:
    """A transport of messages between the workers of one world.

    Each implements ``start``, ``send``, ``wait`` and ``close``. The defaults of the others are for senders that deliver
    by themselves, in one process.
    """

    rank: int
    size: int
    hands_over: bool  # messages arrive as the very objects that were sent: nothing is encoded

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver messages, by these methods of the receiver.

        ``receive``, ``word`` and ``tick`` must be quick, not wait, and not run users' code.

        * ``word(source, id, scope, bytes)`` takes a word of a meeting, ``receive(message)`` a message. It returns work
          that cannot be done quickly as a task, which the transport must have run, or None.
        * ``run(task)`` runs a task on some thread that may wait. ``enter_thread()`` prepares a thread of the transport.
        * ``tick(now)`` does housekeeping; it is called some hundred times a second.
        * ``fail(error)`` notes that the transport is broken, ``lost(peer, why)`` that a worker has died.
        """

    def send(self, peer: int, message: Message) -> None:
        """Send without waiting for delivery. A message to the own worker is delivered as it is.

        Unless the transport hands objects over, the body of a message that holds users' values (``ENCODED``) is a
        parcel, whose buffers must not change until the message has been sent; the transport pickles other bodies.

        Raises:
          WorldClosedError: the transport is closed (over MPI).
          WorkerLostError: the peer has left (in a local world), or is lost (over MPI, in a world that survives).
          WireError: the transport has failed (over MPI).
        """

    def send_words(self, peers: Sequence[int], identifier: int, scope: int, word: bytes) -> None:
        """Send a few bytes to those workers that are not lost. Raises like ``send``. Meetings of processes use it."""

    def wait_for(self, futures: Futures, timeout: float | None) -> None:
        """Return when one of the futures, which messages complete, is done or the timeout has passed.

        For a single future, this may return at once and leave the waiting to the future.
        """
        target = FirstOf(futures)
        if not target.done:
            with put_off_interrupt():
                self.wait(target, math.inf if timeout is None else time.monotonic() + timeout)

    def wait(self, target: Awaited, deadline: float = math.inf) -> None:
        """Sleep until the target is done, the deadline, a Ctrl-C that this thread defers, or less; callers loop."""

    def wake(self) -> None:
        """Let a waiting thread check its target, which was not completed by a message to it."""

    def close(self, *, graceful: bool) -> None:
        """Finish the running sends and stop. ``graceful``: every worker of the world closes now."""

    def lose(self, peer: int) -> None:
        """Send nothing more to a worker that is lost, in a world that survives."""

    def kill(self, peer: int) -> bool:
        """Kill the process of a hanging worker, in a world that survives; return False if it is out of reach."""
        return False

    def look(self) -> None:
        """Deliver what has arrived, unless another thread does, without waiting."""

    def serve_only(self, *, only: bool) -> None:
        """Set whether the program does nothing of its own here, so that serving may use all of the CPU time."""
