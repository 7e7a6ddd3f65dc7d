"""Doorbells: sockets by which the ranks of one machine wake each other, since MPI wakes nobody.

A thread that has nothing to look for sleeps until its doorbell rings, not for a guessed time: it is up in 20 us, and
meanwhile takes no time from other threads. A ring carries nothing and may be lost: whoever sleeps looks for messages by
itself now and then, as it must where no bell can be heard (ranks on other machines, systems other than Linux).
"""

import contextlib
import select
import socket
import sys
import uuid
from collections.abc import Sequence

from jdistgrad.wire.polling import pause, wake_on_time

HIGHEST_DESCRIPTOR = 1023  # that select takes; poll could not sleep for less than a millisecond


class Doorbell:
    """The doorbell of this process in one world.

    Attributes:
      address: what other processes of this machine need to ring; empty if there is no doorbell.
    """

    def __init__(self) -> None:
        self.address, self._others = "", list[bytes | None]()
        self._socket: socket.socket | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._open()

    def _open(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if made.fileno() > HIGHEST_DESCRIPTOR:
            made.close()
            return
        made.settimeout(0)
        self.address = f"jdistgrad-{uuid.uuid4().hex}"  # nobody on another machine has the same
        made.bind(_spelled(self.address))
        self._socket = made

    @property
    def all_ring(self) -> bool:
        """Whether all ranks ring each other: they are on one machine."""
        return self._socket is not None and bool(self._others) and None not in self._others

    def meet(self, addresses: Sequence[str]) -> None:
        """Take note of the addresses of all ranks, and find out which of them can be rung."""
        self._others = [_spelled(one) if one else None for one in addresses]
        for rank in range(len(addresses)):
            self.ring(rank)

    def ring(self, rank: int) -> None:
        """Wake the rank if it sleeps, and is on this machine."""
        address = self._others[rank] if self._others else None
        if address is None or self._socket is None:
            return
        try:
            self._socket.sendto(b"", address)
        except BlockingIOError:
            pass  # it has been rung for, and has not come yet
        except OSError:  # it is on another machine, or has left
            self._others[rank] = None

    def sleep(self, seconds: float) -> None:
        """Sleep until the bell rings, for so many seconds at most; for 0 seconds, just let others run."""
        own = self._socket  # another thread may close the bell
        if own is None or seconds <= 0:
            pause(seconds)
            return
        wake_on_time()
        with contextlib.suppress(OSError, ValueError):  # it has been closed, or has no ring any more
            if select.select([own], [], [], seconds)[0]:
                while True:  # one look for messages finds all that the rings stand for
                    own.recv(1)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _spelled(address: str) -> bytes:
    """Return the name of a socket that is in no folder, and vanishes with its process."""
    return b"\0" + address.encode()
