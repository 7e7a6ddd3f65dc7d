"""The messages of a program as workers note them: their order, and links, the crossings of the wire, for the graph.

Every message has a place in the order in which the program makes its messages, whatever order they are answered in: a
path of turns. Each message of the program itself has one turn. A message that a worker sends while it serves another
message has that message's path and a turn of its own. Sums are made in this order, so that every run gives the same
result to the last bit.
"""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Iterator

from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import spell, worker_of

Place = tuple[int, ...]

_place: contextvars.ContextVar[tuple[Place, Callable[[], int]]] = contextvars.ContextVar("jdistgrad_place_in_order")
_PROGRAM = (), itertools.count().__next__


class at_place:  # noqa: N801 used like a function; a generator would take twice as long
    """A block whose messages get places below this place, in the order in which it sends them."""

    __slots__ = ("_outer", "_own")

    def __init__(self, place: Place):
        self._own = place, itertools.count().__next__

    def __enter__(self) -> None:
        self._outer = _place.set(self._own)

    def __exit__(self, *error: object) -> None:
        _place.reset(self._outer)


def next_place() -> Place:
    path, turn = _place.get(_PROGRAM)
    return (*path, turn())


_serving: contextvars.ContextVar[int | None] = contextvars.ContextVar("jdistgrad_serving", default=None)


@contextlib.contextmanager
def serving(message: int, place: Place) -> Iterator[None]:
    """Mark a block as serving this message, at the message's place in the program's order."""
    token = _serving.set(message)
    try:
        with at_place(place):
            yield
    finally:
        _serving.reset(token)


def cause() -> int | None:
    """Return the id of the message being served here, or None."""
    return _serving.get()


def next_message() -> int:
    return current_worker().messages.next()


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A crossing of the wire as its sender knows it: a send/recv pair. A message may have carried several."""

    message: int
    source: int
    target: int
    what: str
    backward: bool = False
    caused_by: int | None = None  # the call that this worker was serving
    answers: int | None = None  # the call, if the crossing carries its results
    reference: int | None = None  # the reference, if the crossing carries its value or gradient


# The links of one worker in a context. Making a link takes time, so some are made when somebody reads them.
Links = list[Link | Callable[[], list[Link]]]


def gradient_link(number: int, owner: int, reference: int) -> Callable[[], list[Link]]:
    """Return what makes the link of a contribution that goes to the owner of its value."""
    here, by = current_worker().rank, cause()

    def made() -> list[Link]:
        what = f"gradient of {spell(reference)}"
        return [Link(number, here, owner, what, backward=True, caused_by=by, reference=reference)]

    return made


def answer(message: int, call: int, what: str) -> Link:
    """Return the link for the results of a call, which go back to its caller."""
    return Link(message, current_worker().rank, worker_of(call), what, caused_by=call, answers=call)
