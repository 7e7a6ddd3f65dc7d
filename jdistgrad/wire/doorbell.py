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
import ctypes
import mmap
import os
import select
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

from jdistgrad.wire.polling import pause, wake_on_time

HIGHEST_DESCRIPTOR = 1023  # that select takes; poll could not sleep for less than a millisecond
CLOSED_IN_PROGRAMS = 1  # MFD_CLOEXEC
AWAKE, ASLEEP = 0, 1
Sign = mmap.mmap | bytearray
GONE = ConnectionRefusedError, FileNotFoundError, PermissionError  # of a rank on another machine, or one that has left


class Doorbell:
    """The doorbell of this process in one world.

    Attributes:
      address: what other processes of this machine need to ring; empty if there is no doorbell.
    """

    def __init__(self) -> None:
        self.address = ""
        self._socket: socket.socket | None = None
        self._sign = _unknown()
        self._file, self._sleepers, self._counting = -1, 0, threading.Lock()
        # A socket for each rank: what a rank has not read yet takes room from the socket that has sent it.
        self._others = list[socket.socket | None]()
        self._signs = list[Sign]()
        self._deaf = set[int]()  # ranks that cannot be rung
        if sys.platform == "linux":
            self._open()

    def _open(self) -> None:
        name = f"jdistgrad-{uuid.uuid4().hex}"  # nobody on another machine has the same
        try:
            made = _new_socket()
        except OSError:
            return
        try:
            made.bind(_spelled(name))
        except OSError:
            made.close()
            return
        if made.fileno() > HIGHEST_DESCRIPTOR:
            made.close()
            return
        where, self._sign, self._file = _shared_sign(name)
        self._sign[0] = AWAKE
        self.address, self._socket = f"{name} {where}", made

    @property
    def all_ring(self) -> bool:
        """Whether all ranks ring each other: they are on one machine."""
        return self._socket is not None and bool(self._others) and not self._deaf

    def meet(self, addresses: Sequence[str]) -> None:
        """Take note of the addresses of all ranks, and find out which of them can be rung."""
        self._signs = list(map(_sign_of, addresses))
        self._others = [_connected(one) if one and self._socket is not None else None for one in addresses]
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
            own, self._socket, file, self._file = self._socket, None, self._file, -1
            self._sign[0] = ASLEEP  # who rings finds out that nobody is there
            self._sign = _unknown()  # the memory is given back, whoever keeps the bell
        if file >= 0:
            os.close(file)
        if own is not None:
            own.close()
        for rank in range(len(self._others)):
            self._hang_up(rank)


def _shared_sign(name: str) -> tuple[str, Sign, int]:
    """Make a sign that others of this machine can read; return where they find it, the sign and its file.

    The file lies in memory and ends with the processes that have it open.
    """
    file = -1
    try:
        # Python has the function too, but not if it was built for old systems, like those of conda.
        file = ctypes.CDLL(None).memfd_create(name.encode(), CLOSED_IN_PROGRAMS)
        os.ftruncate(file, mmap.PAGESIZE)
        return f"/proc/{os.getpid()}/fd/{file}", mmap.mmap(file, mmap.PAGESIZE), file
    except (OSError, AttributeError):  # memory is refused, or the system has no such files
        if file >= 0:
            os.close(file)
        return "", _unknown(), -1


def _sign_of(address: str) -> Sign:
    """Return a rank's sign. A rank that cannot show one, as in another container, is rung every time."""
    name, _, path = address.partition(" ")
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # another process has this number here
            return _unknown()
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return _unknown()


def _unknown() -> Sign:
    """Return the sign of a rank that shows none: it may be asleep."""
    return bytearray([ASLEEP])


def _new_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.settimeout(0)
    return made


def _connected(address: str) -> socket.socket | None:
    """Return a socket that rings a bell, or None if the bell is out of reach."""
    made = None
    try:
        made = _new_socket()
        made.connect(_spelled(address.partition(" ")[0]))
    except OSError:
        if made is not None:
            made.close()
        return None
    return made


def _spelled(name: str) -> bytes:
    """Return the name of a socket that is in no folder, and vanishes with its process."""
    return b"\0" + name.encode()
