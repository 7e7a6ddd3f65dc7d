"""The protocol every transport speaks. It moves messages; what they mean is no concern of it."""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jdistgrad.wire.message import Message, Parcel


class Codec(Protocol):
    """Turns values into parcels and back; the layer above decides what may travel."""

    def encode(self, value: Any, *, snapshot: bool) -> Parcel: ...

    def decode(self, parcel: Parcel) -> Any: ...


Task = Callable[[], None]


class Receiver(Protocol):
    """What a transport calls. ``receive`` and ``tick`` must be quick, must not wait and must not run users' code."""

    def receive(self, message: Message) -> Task | None:
        """Take a message; what cannot be done quickly comes back as a task, for a thread that may wait."""

    def run(self, task: Task) -> None:
        """Run a task on some thread that may wait."""

    def enter_thread(self) -> None:
        """Called first in each of the transport's own threads that run tasks."""

    def tick(self, now: float) -> None:
        """Housekeeping, some hundred times a second."""

    def fail(self, error: BaseException) -> None:
        """The transport is broken."""


class Transport(Protocol):
    """Moves messages between the workers of one world."""

    rank: int
    size: int
    hands_over: bool  # messages arrive as the very objects that were sent: nothing is encoded

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver. Nothing is delivered before."""

    def send(self, peer: int, message: Message, *, snapshot: bool = True) -> None:
        """Send without waiting for delivery.

        ``snapshot``: the caller may change its NumPy arrays as soon as this returns. Without it they must stay as
        they are until the message has gone, and large ones are not copied.
        """

    def wait_for(self, futures: Sequence[concurrent.futures.Future], timeout: float | None) -> None:
        """Return when one of some futures that messages will complete is done, or the time is over.

        Of a single one, this may leave the waiting to the future itself.
        """

    def serve_only(self, only: bool) -> None:
        """Whether the program does nothing of its own here, so that serving may take all the time there is."""

    def close(self, *, graceful: bool) -> None:
        """Flush what is under way and stop. Graceful means: every worker of the world closes now."""
