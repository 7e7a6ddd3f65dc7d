"""What transports do, which move messages without interpreting them, and what they call."""

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
    """What ends when messages have come. A future is made only for a thread that sleeps meanwhile."""

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
    """The first of some futures that is done, to be waited for."""

    def __init__(self, futures: Futures):
        self._futures = futures

    @property
    def done(self) -> bool:
        return any(future.done() for future in self._futures)

    def futures(self) -> Futures:
        return self._futures


# What a thread waits for: it looks for messages until ``done``, or sleeps until one of the ``futures`` is done.
Awaited = Ending | FirstOf


Receiver = Any  # what a transport calls: a ``Worker``, of a layer above


class Transport:
    """A transport of messages between the workers of one world.

    Each writes the first four methods. The others do nothing where senders deliver, in one process.
    """

    rank: int
    size: int
    hands_over: bool  # messages arrive as the very objects that were sent: nothing is encoded

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver messages. None is delivered before.

        The transport calls the receiver. ``receive`` and ``tick`` must be quick, not wait, and not run users' code.

        * ``word(source, id, scope, bytes)`` takes a word of a meeting, ``receive(message)`` a message. It returns work
          that cannot be done quickly as a task, which the transport must have run, or None.
        * ``run(task)`` runs a task on some thread that may wait. ``enter_thread()`` prepares a thread of the transport,
          before it runs tasks.
        * ``tick(now)`` does housekeeping; it is called some hundred times a second.
        * ``fail(error)`` takes note that the transport is broken, ``lost(peer, why)`` that a worker has died.
        """

    def send(self, peer: int, message: Message) -> None:
        """Send without waiting for delivery.

        Unless the transport hands objects over, the body of a message to another worker that holds users' values
        (``ENCODED``) is a parcel. The buffers of a parcel must not change until the message has been sent. Such
        a transport itself pickles bodies of the other kinds, and unpickles them. Any transport delivers a message to
        its own worker as it is, unencoded.

        Raises:
          WorldClosedError: the transport is closed (over MPI).
          WorkerLostError: the peer has left (in a local world), or is lost (over MPI, in a world that survives).
          WireError: the transport has failed (over MPI).
        """

    def send_words(self, peers: Sequence[int], identifier: int, scope: int, word: bytes) -> None:
        """Send a few bytes to several workers, but for those that are lost. Only where messages are encoded.

        Raises:
          WorldClosedError: the transport is closed.
          WireError: it has failed.
        """

    def wait_for(self, futures: Futures, timeout: float | None) -> None:
        """Return when one of the futures, which messages complete, is done or the timeout has passed.

        For a single future, this may return at once and leave the waiting to the future.
        """
        target = FirstOf(futures)
        if not target.done:
            with put_off_interrupt():
                self.wait(target, math.inf if timeout is None else time.monotonic() + timeout)

    def wait(self, target: Awaited, deadline: float = math.inf) -> None:
        """Return when the target is done, at the deadline, or when a Ctrl-C has come that the calling thread puts off.

        It may return earlier.
        """

    def wake(self) -> None:
        """Let a thread that waits look whether it has its answer, which has not come by a message to it."""

    def close(self, *, graceful: bool) -> None:
        """Finish the sends under way and stop. ``graceful``: every worker of the world closes now."""

    def lose(self, peer: int) -> None:
        """Send nothing more to a worker that is lost, in a world that survives."""

    def kill(self, peer: int) -> bool:
        """Kill the process of a worker that stands still, in a world that survives; return False if that cannot be."""
        return False

    def look(self) -> None:
        """Deliver what has arrived, unless another thread does, without waiting."""

    def serve_only(self, *, only: bool) -> None:
        """Set whether the program does nothing of its own here, so that serving may use all of the CPU time."""
