"""Large pieces of messages between ranks of one machine, through memory that they share.

The sender copies a piece into its own shared memory and names the place in the message; the receiver uses the piece
there. MPI without the kernel's help, as in most containers, copies twice, and both ranks must take part at once. When
the last array that uses the piece is gone, the receiver sets a mark in the sender's memory. The sender takes the place
back before it looks for room the next time. If there is no room, MPI carries the piece.

The places of a rank that is lost are never used again: it may only stand still, and mark them later.
"""

import bisect
import mmap
import os
import threading
import weakref

import numpy as np

from jdistgrad.wire.shared_memory import SharedMemory, empty

# A rank's shared memory consists of grains. The first one holds the sign of the doorbell, a mark for each grain, and
# one for each rank; the others hold pieces.
GRAIN = 1 << 16
GRAINS = 1 << 12
NBYTES = GRAIN * GRAINS
MARKS = 1 << 12
REACHED_BY = MARKS + GRAINS
RANKS = GRAIN - REACHED_BY
RETURNED = b"\1"


class FreeSpace:
    """The free ranges between two numbers. The lowest range that is long enough is taken first."""

    def __init__(self, start: int, end: int):
        self.ranges = [(start, end)]

    def take(self, length: int) -> int | None:
        """Take a range; return its start, or None if no free range is as long."""
        for k, (start, end) in enumerate(self.ranges):
            if end - start >= length:
                self.ranges[k : k + 1] = [(start + length, end)] if end - start > length else []
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        """Give back a range that was taken; free ranges beside it become one with it."""
        end = start + length
        first = last = bisect.bisect(self.ranges, (start, end))
        if first and self.ranges[first - 1][1] == start:
            first -= 1
            start = self.ranges[first][0]
        if last < len(self.ranges) and self.ranges[last][0] == end:
            end = self.ranges[last][1]
            last += 1
        self.ranges[first:last] = [(start, end)]


class SharedPieces:
    """The pieces that this rank has put in its memory, and those that it finds in the memory of others."""

    def __init__(self, memory: SharedMemory, rank: int):
        self._memory, self._space, self._taking = memory, FreeSpace(1, GRAINS), threading.Lock()
        self._taker = 0  # the thread that looks for room
        self._grains = dict[int, int]()  # by place, how many grains it has
        self._closed = False
        for other in memory.others:
            if other is not None and rank < RANKS:
                other[REACHED_BY + rank] = 1

    def put(self, peer: int, piece: memoryview) -> int:
        """Copy a piece to where the peer finds it; return the place. It is 0 if there is none."""
        own = self._memory.own
        if own is None or peer >= RANKS or not own[REACHED_BY + peer]:
            return 0
        place = self._take(own, -(-piece.nbytes // GRAIN))
        if place:
            np.frombuffer(own, np.uint8, piece.nbytes, place * GRAIN)[:] = np.frombuffer(piece, np.uint8)
        return place

    def _take(self, own: mmap.mmap, grains: int) -> int:
        thread = threading.get_ident()
        if self._taker == thread:  # a __del__ that sends has interrupted it: MPI must carry that piece
            return 0
        with self._taking:
            self._taker = thread
            try:
                self._take_back(own)
                place = self._space.take(grains)
                if place is not None:
                    self._grains[place] = grains
            finally:
                self._taker = 0
        return place or 0

    def _take_back(self, own: mmap.mmap) -> None:
        marks = own[MARKS : MARKS + GRAINS]
        place = marks.find(RETURNED)
        while place >= 0:
            own[MARKS + place] = 0
            grains = self._grains.pop(place, 0)
            if grains:
                self._space.give_back(place, grains)
            place = marks.find(RETURNED, place + 1)

    def found(self, peer: int, place: int, nbytes: int) -> np.ndarray:
        """Return a piece that a peer has put in its memory. Raises OSError if that is out of reach."""
        memory, start = self._memory.others[peer], place * GRAIN
        if memory is None or start + nbytes > len(memory):
            raise OSError(f"the memory of rank {peer} is out of reach")
        piece = np.frombuffer(memory, np.uint8, nbytes, start)
        weakref.finalize(piece, self._give_back, memory, place, nbytes, os.getpid()).atexit = False
        return piece

    def _give_back(self, memory: mmap.mmap, place: int, nbytes: int, process: int) -> None:
        if process == os.getpid():  # what a fork gives back is still its parent's
            if self._closed:
                empty(memory, place * GRAIN, nbytes)
            memory[MARKS + place] = RETURNED[0]

    def close(self) -> None:
        """Let the memory take no more room than the pieces in use, which others may keep for as long as they like."""
        self._closed, own = True, self._memory.own
        if own is not None:
            with self._taking:
                self._take_back(own)
                for start, end in self._space.ranges:
                    empty(own, start * GRAIN, (end - start) * GRAIN)
