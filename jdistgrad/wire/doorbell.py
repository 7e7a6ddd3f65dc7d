"""Doorbells: sockets by which the ranks of one machine wake each other, since MPI wakes nobody.

A thread that has nothing to look for sleeps until its bell rings: the kernel runs it at once, also where all cores are
busy. A ring carries nothing and may be lost: a sleeping thread looks for messages by itself now and then, as it must
where bells cannot reach (ranks on other machines, systems other than Linux).

Each rank has two bells: one for a thread that waits for an answer, which meanwhile is the only one to look for
messages, and one for the thread that serves calls. A ring takes 4 to 8 us, and mostly nobody sleeps, so each rank shows
the others, in a byte of shared memory, which bell to ring. A thread that goes to sleep shows its bell first, and then
looks once more: what was sent before the others could see the byte has not rung.
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
GONE = ConnectionRefusedError, FileNotFoundError, PermissionError  # of a rank on another machine, or one that has left


class Doorbell:
    """The bells of this process in one world.

    Arguments:
      memory: where this rank shows which bell to ring, and sees the others' bytes.

    Attributes:
      address: what other processes of this machine need to ring; empty if there are no bells.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.address, self._memory, self._rank = "", memory, 0
        self._own = dict[int, socket.socket]()
        self._sign: mmap.mmap | bytearray = bytearray([UNKNOWN])
        # Sockets for each rank: what a rank has not read yet takes room from the socket that has sent it.
        self._others = list[dict[int, socket.socket]]()
        self._signs = list[mmap.mmap | bytearray]()
        self._deaf = set[int]()  # ranks that cannot be rung
        if sys.platform == "linux":
            name = f"jdistgrad-{uuid.uuid4().hex}"  # unique among all machines
            self._own = _opened(socket.socket.bind, name)
            if any(one.fileno() > HIGHEST_DESCRIPTOR for one in self._own.values()):
                self.close()
            elif self._own:
                self.address, self._sign = name, memory.own or self._sign
                self._sign[0] = SERVES

    @property
    def all_ring(self) -> bool:
        """Whether all ranks ring each other: they are on one machine."""
        return bool(self._own and self._others) and not self._deaf

    def meet(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks that can be rung, after the memory has met theirs."""
        self._rank = addresses.index(self.address)
        for rank, name in enumerate(addresses):
            self._others.append(_opened(socket.socket.connect, name) if name and self._own else {})
            if not self._others[rank]:
                self._deaf.add(rank)
        signs = [other or bytearray([UNKNOWN]) for other in self._memory.others]
        self._signs = [*signs[: self._rank], self._sign, *signs[self._rank + 1 :]]

    def show(self, bell: int) -> None:
        """Show the others which bell to ring from now on."""
        self._sign[0] = bell

    def ring(self, rank: int, bells: int = WAITS | SERVES) -> None:
        """Wake the rank's sleeping thread, if it sleeps by one of these bells and the rank is on this machine."""
        wanted = self._signs[rank][0] & bells if self._signs else AWAKE
        if wanted:
            for bell, other in self._others[rank].copy().items():
                if wanted & bell:
                    try:
                        other.send(b"")
                    except GONE:
                        self._hang_up(rank)
                        self._deaf.add(rank)
                    except OSError:  # mostly, it has been rung more often than it has looked
                        pass

    def ring_own(self, bells: int) -> None:
        """Wake the sleeping thread of this process, if it sleeps by one of these bells."""
        self.ring(self._rank, bells)

    def lose(self, rank: int) -> None:
        """Forget a rank that will send nothing any more."""
        if self._others:
            self._hang_up(rank)
            self._deaf.discard(rank)

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
        with contextlib.suppress(OSError, ValueError):  # closed, or no more rings
            if not unless() and select.select([own], [], [], seconds)[0]:
                while True:  # the look that follows is for all rings so far
                    own.recv(1)

    def close(self) -> None:
        own, self._own = self._own, {}
        self._sign[0] = UNKNOWN  # who rings finds out that nobody is there
        self._sign = bytearray([UNKNOWN])  # the memory is given back, even if the bell is kept
        for one in own.values():
            one.close()
        for rank in range(len(self._others)):
            self._hang_up(rank)


def _opened(prepare: Callable[[socket.socket, bytes], None], name: str) -> dict[int, socket.socket]:
    """Return sockets for a rank's bells; none if the rank is out of reach."""
    made = {bell: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for bell in BELLS}
    try:
        for bell, one in made.items():
            one.settimeout(0)
            prepare(one, f"\0{name}-{bell}".encode())  # an abstract address (unix(7)): vanishes with its process
    except OSError:
        for one in made.values():
            one.close()
        return {}
    return made
