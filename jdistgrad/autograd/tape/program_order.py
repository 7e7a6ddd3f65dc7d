"""The order in which a program makes its messages, whatever order they are answered in.

Every message has a place: a path of turns. Each message of the program itself has one turn, in the order in which the
program makes them. A message that a worker sends while it serves another message has that message's path and a turn of
its own. Sums are made in this order, so that every run gives the same result to the last bit.
"""

import contextvars
import itertools
from collections.abc import Callable

Place = tuple[int, ...]

_place: contextvars.ContextVar[tuple[Place, Callable[[], int]]] = contextvars.ContextVar("jdistgrad_place_in_order")
_PROGRAM = (), itertools.count().__next__


class at:  # noqa: N801 used like a function; a generator would take twice as long
    """A block whose messages get places below this place, in the order in which it sends them."""

    __slots__ = ("_outer", "_own")

    def __init__(self, place: Place):
        self._own = place, itertools.count().__next__

    def __enter__(self) -> None:
        self._outer = _place.set(self._own)

    def __exit__(self, *error: object) -> None:
        _place.reset(self._outer)


def next_place() -> Place:
    """Return the place of the next message."""
    path, turn = _place.get(_PROGRAM)
    return (*path, turn())
