"""MPI reductions of any dtype, including those without an MPI type (float16, bfloat16, 8-bit floats)."""

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from jdistgrad.data_parallel.collectives.host import COMBINE
from jdistgrad.wire.arrays import EXTENSIONS_FROM

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}
_CARRIERS = {1: (np.uint8, MPI.UINT8_T), 2: (np.uint16, MPI.UINT16_T)}


def allreduce(comm: Any, memory: np.ndarray, op: str, chunk: int) -> None:
    """Reduce contiguous memory in place, at most ``chunk`` bytes at a time."""
    if comm.size == 1:
        return
    flat, kind, operation = _as_mpi(memory.reshape(-1), op)
    step = max(1, chunk // flat.itemsize)
    for start in range(0, flat.size, step):
        comm.Allreduce(MPI.IN_PLACE, [flat[start : start + step], kind], operation)


def _as_mpi(flat: np.ndarray, op: str) -> tuple[np.ndarray, Any, Any]:
    if flat.dtype.num < EXTENSIONS_FROM and flat.dtype.char in MPI._typedict:
        operation = _OPS[op] if _fits_mpi(flat.dtype, op) else _custom_op(flat.dtype, op)
        return flat, MPI._typedict[flat.dtype.char], operation
    carrier, kind = _CARRIERS[flat.dtype.itemsize]
    return flat.view(carrier), kind, _custom_op(flat.dtype, op)


def _fits_mpi(dtype: np.dtype, op: str) -> bool:
    """Return whether MPI's own operation gives NumPy's results."""
    if op == "sum":
        return dtype.kind not in "iu" or dtype.itemsize > 2  # Open MPI's sums of small integers stop at the largest
    return dtype.kind != "f"  # MPI's maximum of NaN depends on the rank that holds it


@functools.cache
def _custom_op(dtype: np.dtype, op: str) -> Any:
    """Create an MPI operation on a NumPy dtype.

    Sending 16-bit floats as they are takes half the bytes of sending 32 bits, but rounds after each addition.
    """
    combine, wide = COMBINE[op], np.float32 if dtype.itemsize <= 2 and dtype.kind not in "iu" else dtype

    def run(theirs: Any, ours: Any, _: Any) -> None:
        a, b = np.frombuffer(theirs, dtype), np.frombuffer(ours, dtype)
        b[:] = combine(a.astype(wide), b.astype(wide))

    return MPI.Op.Create(run, commute=True)
