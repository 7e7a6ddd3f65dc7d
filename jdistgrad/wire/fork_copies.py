"""Copies of shared memory for forked processes: a fork has its own copy of all other memory.

The process that forks makes the copies, since it may change its arrays as soon as it has forked. The child lays them
over the shared memory, at the same addresses.
"""

import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

FIXED = 0x10  # MAP_FIXED: what is at this address makes way

_arrays: dict[int, "weakref.ref[np.ndarray]"] = {}  # in shared memory, by their addresses


class _Fork(threading.local):
    """What the thread that forks has copied, with the addresses."""

    def __init__(self) -> None:
        self.copies = list[tuple[int, np.ndarray]]()


_fork = _Fork()


def watch(array: np.ndarray) -> int:
    """Let processes that are forked while an array lives have a copy of it; return its address.

    Arguments:
      array: contiguous bytes of shared memory from the beginning of a page on; nothing else lies in their last page.
    """
    address = array.ctypes.data
    _arrays[address] = weakref.ref(array)
    return address


def forget(address: int) -> None:
    """Forget the array at this address, which is gone. Another may be there as soon as this returns."""
    _arrays.pop(address, None)


def _before() -> None:
    found = [(address, array()) for address, array in list(_arrays.items())]
    _fork.copies = [(address, array.copy()) for address, array in found if array is not None]


def _in_parent() -> None:
    _fork.copies = []


def _in_child() -> None:
    _arrays.clear()
    while _fork.copies:
        _lay_over(*_fork.copies.pop())


def _lay_over(address: int, copy: np.ndarray) -> None:
    lay = ctypes.CDLL(None, use_errno=True).mmap  # Python's own chooses the address
    lay.restype = ctypes.c_void_p
    lay.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
    if lay(address, copy.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        why = os.strerror(ctypes.get_errno())
        raise MemoryError(f"an array of {copy.nbytes} bytes is still shared with the process that forked: {why}")
    ctypes.memmove(address, copy.ctypes.data, copy.nbytes)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
