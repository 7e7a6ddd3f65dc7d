"""Memory that the ranks of one machine share: each has its own, which the others can read and write.

It is a file without a name, which lies in memory and ends with the processes that have it open, however they end. Its
pages take no memory before they are written to. Where a rank's memory is out of reach, on another machine or in
another container, the others do without.
"""

import contextlib
import ctypes
import mmap
import os
import sys
import uuid
from collections.abc import Sequence

CLOSED_IN_PROGRAMS = 1  # MFD_CLOEXEC


class SharedMemory:
    """The shared memory of this process in one world, and that of the other ranks.

    Attributes:
      address: what other processes of this machine need to find this memory; empty if there is none.
      own: this memory, or None.
      others: by rank, the memory of each rank that is within reach; None for the others.
    """

    def __init__(self, nbytes: int) -> None:
        self.address = ""
        self.own: mmap.mmap | None = None
        self.others = list[mmap.mmap | None]()
        self._file = -1
        if sys.platform == "linux":
            self._make(f"jdistgrad-{uuid.uuid4().hex}", nbytes)  # nobody on another machine has the same

    def _make(self, name: str, nbytes: int) -> None:
        try:
            # Python has the function too, but not if it was built for old systems, like those of conda.
            self._file = ctypes.CDLL(None).memfd_create(name.encode(), CLOSED_IN_PROGRAMS)
            os.ftruncate(self._file, nbytes)
            self.own = mmap.mmap(self._file, nbytes)
            self.address = f"{name} /proc/{os.getpid()}/fd/{self._file}"
        except (OSError, AttributeError):  # memory is refused, or the system has no such files
            self._close_file()

    def meet(self, addresses: Sequence[str]) -> None:
        """Take note of the addresses of all ranks, and open the memory of those within reach."""
        own = self.own  # who has no memory uses that of nobody else
        self.others = [own if own is None or one == self.address else _opened(one) for one in addresses]

    def lose(self, rank: int) -> None:
        """Forget the memory of a rank that has left or died. What is in use there stays."""
        if self.others:
            self.others[rank] = None

    def close(self) -> None:
        """Give the memory back as soon as nothing uses it."""
        self.own = None
        self.others = [None] * len(self.others)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def empty(memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Give the pages of a part of some memory back to the system, for all who share them."""
    with contextlib.suppress(OSError):  # a kernel that cannot: they end with the memory
        memory.madvise(mmap.MADV_REMOVE, start, nbytes)


def _opened(address: str) -> mmap.mmap | None:
    name, _, path = address.partition(" ")
    try:
        if not os.readlink(path).startswith(f"/memfd:{name}"):  # another process has this number here
            return None
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
