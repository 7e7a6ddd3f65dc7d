"""64-bit identifiers: the rank of the worker that made them in the top 16 bits, the worker's counter in the low 48."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

COUNTER_BITS = 48
MAX_WORKERS = 1 << 16


def ids_of(rank: int) -> Iterator[int]:
    """Return one worker's identifiers, in order. Safe from any thread."""
    assert 0 <= rank < MAX_WORKERS
    return itertools.count(rank << COUNTER_BITS)


def worker_of(identifier: int) -> int:
    """Return the rank of the worker that made an identifier."""
    return identifier >> COUNTER_BITS


def as_token(*identifiers: int) -> np.ndarray:
    """Return identifiers as an array of 32-bit halves: JAX has no 64-bit integers by default.

    One is added to each, so that no token is zero: see ``stands_for_nothing``.
    """
    numbers = [one + 1 for one in identifiers]
    return np.array([part for one in numbers for part in (one >> 32, one & 0xFFFFFFFF)], np.uint32)


def from_token(token: Any) -> tuple[int, ...]:
    parts = np.asarray(token).tolist()
    return tuple((high << 32 | low) - 1 for high, low in zip(parts[::2], parts[1::2], strict=True))


def stands_for_nothing(token: Any) -> bool:
    """Return whether a token is zeros, with which loops fill the place of a value that they have not computed yet."""
    return not np.any(token)


def spell(identifier: int) -> str:
    """Return an identifier as messages print it: rank and counter."""
    return f"{worker_of(identifier)}:{identifier & ((1 << COUNTER_BITS) - 1)}"
