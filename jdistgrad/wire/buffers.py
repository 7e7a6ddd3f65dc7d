"""A pool of reusable receive buffers.

A fresh buffer of 64 MiB costs more in page faults than the copy into it. A lease is a plain ``uint8`` array; when the
last view of the lease dies, on any thread, its memory returns to the pool. JAX arrays that alias it count as views.
"""

import collections
import contextlib
import mmap
import weakref

import numpy as np

GRAIN = 1 << 16
IDLE_LIMIT = 1 << 30


def size_class(nbytes: int) -> int:
    """Round up to an eighth of the next lower power of two, so that similar sizes share their blocks."""
    step = max(GRAIN, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


class BufferPool:
    """A pool that leases page-aligned memory and keeps up to ``idle_limit`` returned bytes for reuse."""

    def __init__(self, idle_limit: int = IDLE_LIMIT):
        self._idle_limit = idle_limit
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._idle_bytes = 0
        # Finalizers run in any thread at any moment, even inside this class: they may only append here.
        self._returned: collections.deque[mmap.mmap] = collections.deque()

    def lease(self, nbytes: int) -> np.ndarray:
        """Return a writable array of ``nbytes`` bytes. Only one thread may lease."""
        self._take_back()
        block = self._block(size_class(nbytes))
        lease = np.frombuffer(block, np.uint8)[:nbytes]
        # NumPy collapses chains of views down to the array directly on the mmap, so that array lives longest.
        weakref.finalize(lease.base, self._returned.append, block).atexit = False
        return lease

    @property
    def idle_bytes(self) -> int:
        self._take_back()
        return self._idle_bytes

    def _block(self, size: int) -> mmap.mmap:
        free = self._idle.get(size)
        if free:
            self._idle_bytes -= size
            return free.pop()
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # huge pages need a private one
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if self._idle_bytes + len(block) <= self._idle_limit:
                self._idle_bytes += len(block)
                self._idle.setdefault(len(block), []).append(block)
