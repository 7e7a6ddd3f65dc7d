"""Memory for large pieces of messages: shared by the ranks of a machine, or leased to receive what MPI sends.

Each rank has shared memory, which the others can read and write. The sender copies a piece into its own memory and
names the place in the message; the receiver uses the piece there. (MPI without the kernel's help, as in most
containers, copies twice, and both ranks must take part at once.) When the last array that uses the piece is gone, the
receiver sets a mark in the sender's memory, and the sender reuses the place. If there is no room, MPI carries the
piece. The places of a lost rank are never reused: the rank may only hang, and mark them later.
"""

import collections
import contextlib
import ctypes
import mmap
import os
import re
import sys
import threading
import uuid
import weakref
from collections.abc import Sequence

import numpy as np

# A rank's shared memory consists of grains. The first holds the doorbell's byte, a mark for each grain and each rank;
# the others hold pieces.
GRAIN = 1 << 16
GRAINS = 1 << 12
NBYTES = GRAIN * GRAINS
MARKS = 1 << 12
REACHED_BY = MARKS + GRAINS
RANKS = GRAIN - REACHED_BY
RETURNED = b"\1"

IDLE_LIMIT = 1 << 30  # bytes of leased memory that are kept for reuse


class SharedMemory:
    """The shared memory of this process in one world, and that of the other ranks.

    It is an anonymous file (``memfd_create(2)``), which ends with the processes that have it open, however they end.
    Its pages take no memory before they are written to.

    Attributes:
      address: what other processes of this machine need to open this memory; empty if there is none.
      own: this memory, or None.
      others: by rank, its memory; None if out of reach, on another machine or in another container.
    """

    def __init__(self) -> None:
        self.address = ""
        self.own: mmap.mmap | None = None
        self.others = list[mmap.mmap | None]()
        self._file, self._closed, self._taking = -1, False, threading.Lock()
        self._used = bytearray(b"\1" + bytes(GRAINS - 1))  # by grain
        self._grains = dict[int, int]()  # by place, how many grains it has
        if sys.platform == "linux":
            name = f"jdistgrad-{uuid.uuid4().hex}"  # unique among all machines
            try:
                # Pythons built for old systems, as conda's, lack os.memfd_create.
                self._file = ctypes.CDLL(None).memfd_create(name.encode(), 1)  # MFD_CLOEXEC
                os.ftruncate(self._file, NBYTES)
                self.own = mmap.mmap(self._file, NBYTES)
                self.address = f"{name} /proc/{os.getpid()}/fd/{self._file}"
            except (OSError, AttributeError):  # memory is refused, or the system has no such files
                self._close_file()

    def meet(self, addresses: Sequence[str], rank: int) -> None:
        """Open the memory of all ranks within reach, and mark there that it is."""
        own = self.own  # a rank without memory uses that of no other
        self.others = [own if own is None or one == self.address else _opened(one) for one in addresses]
        for other in self.others:
            if other is not None and rank < RANKS:
                other[REACHED_BY + rank] = 1

    def lose(self, rank: int) -> None:
        """Forget the memory of a rank that has left or died, but for the pieces in use."""
        if self.others:
            self.others[rank] = None

    def put(self, peer: int, piece: memoryview) -> int:
        """Copy a piece to where the peer finds it; return the place, 0 if there is none."""
        own = self.own
        if own is None or peer >= RANKS or not own[REACHED_BY + peer]:
            return 0
        grains = -(-piece.nbytes // GRAIN)
        with self._taking:
            self._take_back(own)
            place = self._used.find(bytes(grains))
            if place < 0:
                return 0
            self._used[place : place + grains] = b"\1" * grains
            self._grains[place] = grains
        np.frombuffer(own, np.uint8, piece.nbytes, place * GRAIN)[:] = np.frombuffer(piece, np.uint8)
        return place

    def _take_back(self, own: mmap.mmap) -> None:
        marks = own[MARKS : MARKS + GRAINS]
        place = marks.find(RETURNED)
        while place >= 0:
            own[MARKS + place] = 0
            grains = self._grains.pop(place)
            self._used[place : place + grains] = bytes(grains)
            place = marks.find(RETURNED, place + 1)

    def found(self, peer: int, place: int, nbytes: int) -> np.ndarray | None:
        """Return a piece that a peer has put in its memory; None if the peer is lost."""
        memory = self.others[peer]
        if memory is None:
            return None
        piece = np.frombuffer(memory, np.uint8, nbytes, place * GRAIN)
        weakref.finalize(piece, self._give_back, memory, place, nbytes, os.getpid()).atexit = False
        return piece

    def _give_back(self, memory: mmap.mmap, place: int, nbytes: int, process: int) -> None:
        if process == os.getpid():  # a fork does not own its parent's pieces
            if self._closed:
                _empty(memory, place * GRAIN, nbytes)
            memory[MARKS + place] = RETURNED[0]

    def close(self) -> None:
        """Give the memory back, but for the pieces in use, which others may keep."""
        own, self.own, self._closed = self.own, None, True
        self.others = [None] * len(self.others)
        if own is not None:
            with self._taking:
                self._take_back(own)
                for free in re.finditer(rb"\0+", self._used):
                    _empty(own, free.start() * GRAIN, len(free[0]) * GRAIN)
        self._close_file()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _opened(address: str) -> mmap.mmap | None:
    name, _, path = address.partition(" ")
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # another process has this number here
            return None
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None


def _empty(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Give pages back to the system, for all processes that share them."""
    with contextlib.suppress(OSError):  # a kernel that cannot: they end with the memory
        memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def size_class(nbytes: int) -> int:
    """Round up to an eighth of the next lower power of two, so that similar sizes share their blocks."""
    step = max(GRAIN, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class BufferPool:
    """A pool of page-aligned memory to receive into, which keeps up to ``idle_limit`` returned bytes for reuse.

    A fresh buffer of 64 MiB costs more in page faults than the copy into it. A lease is a plain ``uint8`` array, whose
    memory returns to the pool when its last view dies, on any thread; JAX arrays that alias it count as views.
    """

    def __init__(self, idle_limit: int = IDLE_LIMIT):
        self._idle_limit = idle_limit
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        # Finalizers run in any thread at any moment, even inside this class: they may only append here.
        self._returned: collections.deque[mmap.mmap] = collections.deque()

    def lease(self, nbytes: int) -> np.ndarray:
        """Return a writable array of ``nbytes`` bytes. Only one thread may lease."""
        self._take_back()
        size = size_class(nbytes)
        free = self._idle.get(size)
        if free:
            self._idle_bytes -= size
            block = free.pop()
        else:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # huge pages need a private one
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    block.madvise(mmap.MADV_HUGEPAGE)
        lease = np.frombuffer(block, np.uint8)[:nbytes]
        # NumPy collapses chains of views down to the array directly on the mmap, so that array lives longest.
        weakref.finalize(lease.base, self._returned.append, block).atexit = False
        return lease

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if self._idle_bytes + len(block) <= self._idle_limit:
                self._idle_bytes += len(block)
                self._idle.setdefault(len(block), []).append(block)
