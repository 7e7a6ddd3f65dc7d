"""The order in which a program makes its messages, whatever order they are answered in.

Every message has a place: a path of turns. The program's own messages have one turn each, as they stand in the program;
those a worker sends while it serves one of them have its path and a turn of their own. Sums are made in this order, so
that they come out the same, to the last bit, in every run.
"""

import contextvars
import itertools
from collections.abc import Callable

Place = tuple[int, ...]

_place: contextvars.ContextVar[tuple[Place, Callable[[], int]]] = contextvars.ContextVar("jdistgrad_place_in_order")
_PROGRAM = (), itertools.count().__next__


class at:  # noqa: N801 used like a function; a generator would take twice as long
    """A block whose messages come at this place, in the order it sends them."""

    __slots__ = ("_outer", "_own")

    def __init__(self, place: Place):
        self._own = place, itertools.count().__next__

    def __enter__(self) -> None:
        self._outer = _place.set(self._own)

    def __exit__(self, *error: object) -> None:
        _place.reset(self._outer)


def next_place() -> Place:
    """The place of the next message."""
    path, turn = _place.get(_PROGRAM)
    return (*path, turn())
