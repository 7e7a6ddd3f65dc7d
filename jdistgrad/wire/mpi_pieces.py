"""Bytes over MPI that are not messages of a world: in parts, because MPI counts bytes in C ints."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

CHUNK = 1 << 30  # bytes: more than this overflows the int that MPI counts with


def chunks(piece: Any) -> list[memoryview]:
    view = memoryview(piece)
    return [view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK)]


def allgather(comm: MPI.Intracomm, tag: int, pieces: Sequence[Any]) -> list[list[memoryview]]:
    """Return the pieces of bytes of all ranks, by rank, in memory of their own. Every rank must call it."""
    views = [memoryview(piece).cast("B") for piece in pieces]
    table = struct.pack(f"<{len(views)}Q", *[view.nbytes for view in views])
    parts = [part for view in views for part in chunks(view)]
    sent = [comm.Isend([part, MPI.BYTE], peer, tag) for peer in range(comm.size) for part in (table, *parts)]
    found = [_received(comm, peer, tag) for peer in range(comm.size)]
    MPI.Request.Waitall(sent)
    return found


def _received(comm: MPI.Intracomm, peer: int, tag: int) -> list[memoryview]:
    status = MPI.Status()
    comm.Probe(peer, tag, status)
    table = bytearray(status.Get_count(MPI.BYTE))
    comm.Recv([table, MPI.BYTE], peer, tag)
    pieces = [np.empty(length, np.uint8).data for (length,) in struct.iter_unpack("<Q", table)]
    for piece in pieces:
        for part in chunks(piece):
            comm.Recv([part, MPI.BYTE], peer, tag)
    return pieces
