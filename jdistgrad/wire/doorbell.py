"""Doorbells: sockets by which the ranks of one machine wake each other, since MPI wakes nobody.

A thread that has nothing to look for sleeps until its doorbell rings, not for a guessed time: it is up in 20 to 60 us,
and meanwhile takes no time from other threads. A ring carries nothing and may be lost: a thread that sleeps looks for
messages by itself now and then, as it must where no bell can be heard (ranks on other machines, systems other than
Linux).

To ring takes 4 to 8 us, and mostly nobody sleeps. So each rank shows the others, in a byte of shared memory, whether
one of its threads sleeps. A thread that goes to sleep shows that first, and then looks once more: what was sent before
the others could see it has not rung.
"""

import contextlib
import mmap
import select
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

from jdistgrad.wire.memory import SharedMemory
from jdistgrad.wire.polling import pause, wake_on_time

HIGHEST_DESCRIPTOR = 1023  # that select takes; poll could not sleep for less than a millisecond
AWAKE, ASLEEP = 0, 1  # the first byte of a rank's memory
Sign = mmap.mmap | bytearray
GONE = ConnectionRefusedError, FileNotFoundError, PermissionError  # of a rank on another machine, or one that has left


class Doorbell:
    """The doorbell of this process in one world.

    Arguments:
      memory: where it shows whether a thread sleeps, and sees whether others do.

    Attributes:
      address: what other processes of this machine need to ring; empty if there is no doorbell.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.address, self._memory = "", memory
        self._socket: socket.socket | None = None
        self._sign: Sign = _unknown()
        self._sleepers, self._counting = 0, threading.Lock()
        # A socket for each rank: what a rank has not read yet takes room from the socket that has sent it.
        self._others = list[socket.socket | None]()
        self._signs = list[Sign]()
        self._deaf = set[int]()  # ranks that cannot be rung
        if sys.platform == "linux":
            name = f"jdistgrad-{uuid.uuid4().hex}"  # nobody on another machine has the same
            made = _opened(socket.socket.bind, name)
            if made is not None and made.fileno() > HIGHEST_DESCRIPTOR:
                made.close()
            elif made is not None:
                self.address, self._socket = name, made
                self._sign = memory.own or _unknown()
                self._sign[0] = AWAKE

    @property
    def all_ring(self) -> bool:
        """Whether all ranks ring each other: they are on one machine."""
        return self._socket is not None and bool(self._others) and not self._deaf

    def meet(self, addresses: Sequence[str]) -> None:
        """Take note of the addresses of all ranks, whose memory is known, and find out which of them can be rung."""
        reached = [one if self._socket is not None else "" for one in addresses]
        self._signs = [other or _unknown() for other in self._memory.others]
        self._others = [_opened(socket.socket.connect, one) if one else None for one in reached]
        self._deaf = {rank for rank, other in enumerate(self._others) if other is None}

    def ring(self, rank: int) -> None:
        """Wake the rank if it sleeps, and is on this machine."""
        other = self._others[rank] if self._others and self._signs[rank][0] else None
        if other is None:
            return
        try:
            other.send(b"")
        except OSError as error:  # mostly, it has been rung for more often than it has come
            if isinstance(error, GONE):
                self._deaf.add(rank)
                self._hang_up(rank)

    def lose(self, rank: int) -> None:
        """Forget a rank that will send nothing any more."""
        if self._others:
            self._hang_up(rank)
            self._deaf.discard(rank)

    def _hang_up(self, rank: int) -> None:
        other, self._others[rank], self._signs[rank] = self._others[rank], None, _unknown()
        if other is not None:
            other.close()

    def sleep(self, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Sleep until the bell rings, for so many seconds at most; for 0 seconds, just let others run.

        Arguments:
          unless: returns whether there is something to look for, which may have come without a ring.
        """
        own = self._socket  # another thread may close the bell
        if own is None or seconds <= 0:
            pause(seconds)
            return
        wake_on_time()
        with self._asleep(), contextlib.suppress(OSError, ValueError):  # it has been closed, or has no ring any more
            if not unless() and select.select([own], [], [], seconds)[0]:
                while True:  # the look that follows is for all rings so far
                    own.recv(1)

    @contextlib.contextmanager
    def _asleep(self) -> Iterator[None]:
        """Show that a thread sleeps."""
        with self._counting:
            self._sleepers += 1
            self._sign[0] = ASLEEP
        try:
            yield
        finally:
            with self._counting:
                self._sleepers -= 1
                if not self._sleepers and self._socket is not None:
                    self._sign[0] = AWAKE

    def close(self) -> None:
        with self._counting:
            own, self._socket = self._socket, None
            self._sign[0] = ASLEEP  # who rings finds out that nobody is there
            self._sign = _unknown()  # the memory is given back, whoever keeps the bell
        if own is not None:
            own.close()
        for rank in range(len(self._others)):
            self._hang_up(rank)


def _unknown() -> bytearray:
    """Return the sign of a rank that shows none: it may be asleep, and is rung every time."""
    return bytearray([ASLEEP])


def _opened(prepare: Callable[[socket.socket, bytes], None], name: str) -> socket.socket | None:
    """Return a socket of its own for a bell with a name, or None if the bell is out of reach."""
    made = None
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.settimeout(0)
        prepare(made, b"\0" + name.encode())  # a name that is in no folder, and vanishes with its process
        return made
    except OSError:
        if made is not None:
            made.close()
        return None
