"""Routes: which rank sends its array to which."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Route:
    """Pairs of a sender and its receiver. A rank is the sender of one pair at most, and the receiver of one at most.

    Attributes:
      words: what the route is, as the ranks compare it; ``back``: the same of the way back.
    """

    pairs: tuple[tuple[int, int], ...]
    words: str
    back: str

    def __str__(self) -> str:
        return self.words

    def target(self, rank: int) -> int | None:
        return next((receiver for sender, receiver in self.pairs if sender == rank), None)

    def source(self, rank: int) -> int | None:
        return self.reversed().target(rank)

    def reversed(self) -> "Route":
        return Route(tuple((receiver, sender) for sender, receiver in self.pairs), self.back, self.words)

    def arrives(self, size: int) -> np.ndarray:
        """Return for each rank whether anything is sent to it."""
        return np.isin(np.arange(size), [receiver for _, receiver in self.pairs])


def shifted(size: int, by: Any, *, wrap: bool) -> Route:
    """Return the route on which every rank sends to the rank ``by`` places further on, in a ring or in a row."""
    if not isinstance(by, int | np.integer) or isinstance(by, bool):
        raise ValueError(f"shift: by must be a whole number, the same on all ranks, not {by!r}")
    return _ring(size, int(by) % size) if wrap else _row(size, int(by))


@functools.cache
def _ring(size: int, by: int) -> Route:
    return Route(tuple((rank, (rank + by) % size) for rank in range(size)), f"by {by}", f"by {-by % size}")


@functools.cache
def _row(size: int, by: int) -> Route:
    pairs = tuple((rank, rank + by) for rank in range(size) if 0 <= rank + by < size)
    return Route(pairs, f"by {by} in a row", f"by {-by} in a row")


def permuted(size: int, pairs: Any) -> Route:
    """Return the route of pairs of a sender and its receiver. Raises ValueError if they are none."""
    found = tuple(_pairs(size, pairs))
    for ends, what in zip(zip(*found, strict=True), ("sends to", "gets from"), strict=False):
        twice = next((rank for rank in ends if ends.count(rank) > 1), None)
        if twice is not None:
            raise ValueError(
                f"permute: rank {twice} {what} several ranks in {list(found)}. Permute several times, or use alltoall."
            )
    return Route(found, f"along {list(found)}", f"back along {list(found)}")


def _pairs(size: int, pairs: Iterable[Any]) -> Iterator[tuple[int, int]]:
    for pair in pairs:
        ends = tuple(pair) if isinstance(pair, Iterable) else (pair,)
        if len(ends) != 2 or not all(isinstance(end, int | np.integer) and 0 <= end < size for end in ends):
            raise ValueError(f"permute: pairs are (sender, receiver), ranks from 0 to {size - 1}, not {pair!r}")
        yield int(ends[0]), int(ends[1])
