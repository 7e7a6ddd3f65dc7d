"""Doorbells: sockets by which the ranks of one machine wake each other, since MPI wakes nobody.

A thread that has nothing to look for sleeps until its bell rings: the kernel runs it at once, also where all cores are
busy, as it has slept. A ring carries nothing and may be lost: a thread that sleeps looks for messages by itself now and
then, as it must where no bell can be heard (ranks on other machines, systems other than Linux).

Each rank has two bells. One is for a thread that waits for an answer: as long as there is one, it alone looks for
messages. The other one is for the thread that serves calls meanwhile. To ring takes 4 to 8 us, and mostly nobody
sleeps. So each rank shows the others, in a byte of shared memory, which bell is to be rung. A thread that goes to sleep
shows that first, and then looks once more: what was sent before the others could see it has not rung.
"""

import contextlib
import mmap
import select
import socket
import sys
import uuid
from collections.abc import Callable, Sequence

from jdistgrad.wire.memory import SharedMemory
from jdistgrad.wire.polling import pause, wake_on_time

HIGHEST_DESCRIPTOR = 1023  # that select takes; poll could not sleep for less than a millisecond
AWAKE, WAITS, SERVES = 0, 1, 2  # the first byte of a rank's memory: the bells to ring
UNKNOWN = WAITS | SERVES
BELLS = WAITS, SERVES
Sign = mmap.mmap | bytearray
GONE = ConnectionRefusedError, FileNotFoundError, PermissionError  # of a rank on another machine, or one that has left


class Doorbell:
    """The bells of this process in one world.

    Arguments:
      memory: where it shows which bell is to be rung, and sees those of others.

    Attributes:
      address: what other processes of this machine need to ring; empty if there are no bells.
      all_ring: whether all ranks ring each other: they are on one machine.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.address, self._memory, self.all_ring = "", memory, False
        self._own = dict[int, socket.socket]()
        self._sign: Sign = bytearray([UNKNOWN])
        # Sockets for each rank: what a rank has not read yet takes room from the socket that has sent it.
        self._others = list[dict[int, socket.socket]]()
        self._signs = list[Sign]()
        self._deaf = set[int]()  # ranks that cannot be rung
        if sys.platform == "linux":
            name = f"jdistgrad-{uuid.uuid4().hex}"  # nobody on another machine has the same
            made = {bell: _opened(socket.socket.bind, name, bell) for bell in BELLS}
            self._own = {bell: one for bell, one in made.items() if one is not None}
            if any(one.fileno() > HIGHEST_DESCRIPTOR for one in self._own.values()) or len(self._own) < len(BELLS):
                self.close()
            else:
                self.address, self._sign = name, memory.own or self._sign
                self._sign[0] = SERVES

    def meet(self, addresses: Sequence[str]) -> None:
        """Take note of the addresses of all ranks, whose memory is known, and find out which of them can be rung."""
        self._signs = [other or bytearray([UNKNOWN]) for other in self._memory.others]
        self._rank = addresses.index(self.address)
        for rank, name in enumerate(addresses):
            made = {bell: _opened(socket.socket.connect, name, bell) for bell in BELLS if name and self._own}
            self._others.append({bell: one for bell, one in made.items() if one is not None})
            if len(self._others[rank]) < len(BELLS):
                self._deaf.add(rank)
        self.all_ring = not self._deaf

    def show(self, bell: int) -> None:
        """Show the others which bell is to be rung from now on."""
        self._sign[0] = bell

    def ring(self, rank: int, bells: int = WAITS | SERVES) -> None:
        """Wake the rank's thread that sleeps, if one does by one of these bells, and the rank is on this machine."""
        wanted = self._signs[rank][0] & bells if self._signs else AWAKE
        if wanted:
            for bell, other in self._others[rank].copy().items():
                if wanted & bell:
                    self._send(rank, other)

    def ring_own(self, bells: int) -> None:
        """Wake the thread of this process that sleeps, if it does so by one of these bells."""
        wanted = self._sign[0] & bells
        if wanted and self._others:
            for bell, own in self._others[self._rank].copy().items():
                if wanted & bell:
                    self._send(self._rank, own)

    def _send(self, rank: int, other: socket.socket) -> None:
        try:
            other.send(b"")
        except OSError as error:  # mostly, it has been rung for more often than it has come
            if isinstance(error, GONE):
                self._hang_up(rank)
                self._deaf.add(rank)
                self.all_ring = False

    def lose(self, rank: int) -> None:
        """Forget a rank that will send nothing any more."""
        if self._others:
            self._hang_up(rank)
            self._deaf.discard(rank)
            self.all_ring = bool(self._own) and not self._deaf

    def _hang_up(self, rank: int) -> None:
        others, self._others[rank], self._signs[rank] = self._others[rank], {}, bytearray(1)
        for other in others.values():
            other.close()

    def sleep(self, bell: int, seconds: float, unless: Callable[[], bool] = lambda: False) -> None:
        """Sleep until a bell rings, for so many seconds at most.

        Arguments:
          unless: returns whether there is something to look for, which may have come without a ring.
        """
        own = self._own.get(bell)  # another thread may close the bell
        if own is None:
            pause(seconds)
            return
        wake_on_time()
        with contextlib.suppress(OSError, ValueError):  # it has been closed, or has no ring any more
            if not unless() and select.select([own], [], [], seconds)[0]:
                while True:  # the look that follows is for all rings so far
                    own.recv(1)

    def close(self) -> None:
        own, self._own, self.all_ring = self._own, {}, False
        self._sign[0] = UNKNOWN  # who rings finds out that nobody is there
        self._sign = bytearray([UNKNOWN])  # the memory is given back, whoever keeps the bell
        for one in own.values():
            one.close()
        for rank in range(len(self._others)):
            self._hang_up(rank)


def _opened(prepare: Callable[[socket.socket, bytes], None], name: str, bell: int) -> socket.socket | None:
    """Return a socket of its own for a rank's bell, or None if the bell is out of reach."""
    made = None
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.settimeout(0)
        prepare(made, f"\0{name}-{bell}".encode())  # a name that is in no folder, and vanishes with its process
        return made
    except OSError:
        if made is not None:
            made.close()
        return None
