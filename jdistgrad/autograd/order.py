"""The order in which a program makes its messages, whatever order they are answered in.

Every message has a place: a path of turns. The program's own messages have one turn each, as they stand in the program;
those a worker sends while it serves one of them have its path and a turn of their own. Sums are made in this order, so
that they come out the same, to the last bit, in every run.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator

Place = tuple[int, ...]

_place: contextvars.ContextVar[tuple[Place, Callable[[], int]]] = contextvars.ContextVar("jdistgrad_place_in_order")
_program = itertools.count()


@contextlib.contextmanager
def at(place: Place) -> Iterator[None]:
    """A block whose messages come at this place, in the order it sends them."""
    turns = itertools.count()
    token = _place.set((place, lambda: next(turns)))
    try:
        yield
    finally:
        _place.reset(token)


def next_place() -> Place:
    """The place of the next message."""
    path, turn = _place.get(((), lambda: next(_program)))
    return (*path, turn())
