"""The tape, one worker's part of a context: recorded pullbacks, gradients, and links: the crossings of the wire.

Every message has a place in the order in which the program makes its messages, whatever order they are answered in: a
path of turns. Each message of the program itself has one turn. A message that a worker sends while it serves another
message has that message's path and a turn of its own. Sums are made in this order, so that every run gives the same
result to the last bit.
"""

import contextlib
import contextvars
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jdistgrad.autograd.tape.ledger import REFERENCE, Contribution, Ledger, Target, total
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope, within
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.interrupts import SteadyCondition, wait_in_slices
from jdistgrad.wire.message import from_token, spell, worker_of

Place = tuple[int, ...]

_place: contextvars.ContextVar[tuple[Place, Callable[[], int]]] = contextvars.ContextVar("jdistgrad_place_in_order")
_PROGRAM = (), itertools.count().__next__


class at_place:  # noqa: N801 used like a function; a generator would take twice as long
    """Give the messages of a block places below this place, in the order in which the block sends them."""

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


cause = _serving.get  # the id of the message being served here, or None


def next_message() -> int:
    return next(current_worker().messages)


class Link(NamedTuple):
    """A crossing of the wire as its sender knows it: a send/recv pair. A message may have carried several."""

    message: int
    source: int
    target: int
    what: str
    backward: bool = False
    caused_by: int | None = None  # the call that this worker was serving
    answers: int | None = None  # the call, if the crossing carries its results
    reference: int | None = None  # the reference, if the crossing carries its value or gradient


# The links of one worker in a context. Links of bundles are made when somebody reads them: naming functions takes time.
Links = list[Link | Callable[[], list[Link]]]


def answer(message: int, call: int, what: str) -> Link:
    """Return the link for the results of a call, which go back to its caller."""
    return Link(message, current_worker().rank, worker_of(call), what, caused_by=call, answers=call)


class Tape:
    """A worker's part of a context. A pull may come before its call has been served: it waits for the recording."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.links: Links = []
        self.kept: list[Any] = []  # references made inside compiled code: nothing else holds them
        self.recordings: dict[int, Any] = {}  # by message, until they have been pulled for the last time
        self.taken: dict[int, list[Contribution]] = {}  # the contributions in sums, by ids, for derivatives of the sums
        self.replayed: dict[tuple[int, int], int] = {}  # the ids drawn at the turns of replayed blocks
        self.lock = threading.Lock()
        self._pulled: set[int] = set()  # messages whose recordings are gone
        self._error: BaseException | None = None
        self._changed = SteadyCondition()

    def record(self, message: int, recording: Any) -> None:
        with self._changed:
            self.recordings[message] = recording
            self._changed.notify_all()

    def find(self, message: int, *, last: bool) -> Any:
        """Wait for the recording of a message and return the recording. ``last``: release it, this is its last pull.

        Raises:
          ContextError: the context closed first, or the recording is requested after its last pull.
        """

        def is_settled() -> bool:
            return message in self.recordings or message in self._pulled or self._error is not None

        with self._changed:
            wait_in_slices(functools.partial(self._changed.wait_for, is_settled))
            if message in self._pulled:
                raise ContextError(
                    f"the recording of message {spell(message)} was released after its last backward pass. "
                    "Differentiate the whole computation again."
                )
            if message not in self.recordings and self._error is not None:
                raise self._error
            if last:
                self._pulled.add(message)
                return self.recordings.pop(message)
            return self.recordings[message]

    def close(self) -> None:
        """Release the recordings, and fail everything that waits for one or for a contribution."""
        self.give_up(ContextError("the context was closed while a gradient was being waited for"))
        with self._changed:
            self.recordings.clear()

    def give_up(self, error: BaseException) -> None:
        """Fail all waits for recordings and contributions with this error, now and later."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.ledger.give_up(self._error)

    def all_links(self) -> list[Link]:
        made = [[one] if isinstance(one, Link) else one() for one in tuple(self.links)]  # other threads may add some
        return [link for links in made for link in links]

    def gradients(self) -> dict[int, list[Any]]:
        """Return, by reference, the sum of the contributions that no take has removed."""
        targets = [target for target in self.ledger.targets() if target.kind == REFERENCE]
        return {target.id: total(self.ledger.read(target)) for target in targets}

    def gradient(self, identifier: int) -> list[Any] | None:
        contributions = self.ledger.read(Target(REFERENCE, identifier))
        return total(contributions) if contributions else None


_replay: contextvars.ContextVar[tuple[int, Iterator[int]] | None] = contextvars.ContextVar(
    "jdistgrad_replay", default=None
)


@contextlib.contextmanager
def replaying(number: Any) -> Iterator[None]:
    """Give a block the same ids in each run: derivatives run a pullback again, but the pullback contributes once.

    ``number`` is a token. If it is traced, nothing is done: code that is being compiled contributes nothing.
    """
    if isinstance(number, jax.core.Tracer):
        yield
        return
    (identifier,) = from_token(number)
    token = _replay.set((identifier, itertools.count()))
    try:
        yield
    finally:
        _replay.reset(token)


def next_number() -> int:
    """Draw the id of the next contribution to a gradient, or of the next sum of contributions."""
    replay = _replay.get()
    if replay is None:
        return next_message()
    tape, turn = current_tape(lambda: "a gradient"), (replay[0], next(replay[1]))
    with tape.lock:
        if turn not in tape.replayed:
            tape.replayed[turn] = next_message()
        return tape.replayed[turn]


def current_tape(what: Callable[[], str]) -> Tape:
    """Return this worker's tape of the current context. Raises ContextError, naming ``what()``, outside any context."""
    scope = current_scope()
    if scope is None:
        raise ContextError(
            f"{what()} is differentiated outside any context, which derivatives through references need, and changes "
            "of state in compiled code. Use jd.grad or jd.value_and_grad, which open one (but not where JAX traces "
            "them: under jax.jit, vmap ...), or differentiate inside `with jd.context():`."
        )
    return scope.content(Tape)


class Lease:
    """Ownership of a context, open or not yet: the context closes when the last holder of the lease is gone."""

    def __init__(self, worker: Worker):
        self._worker, self.id = worker, next(worker.scopes.ids)

    def close(self) -> None:
        """Close the context now."""
        self._worker.releasing.close_scope(self.id)

    def __del__(self) -> None:
        self._worker.releasing.abandoned.append(self.id)


@contextlib.contextmanager
def leased_context(leases: list[Lease]) -> Iterator[None]:
    """Enter the context of the lease in the list; if there is none, open a context and put its lease there."""
    worker = current_worker()
    if not leases:
        leases.append(Lease(worker))
    with within(worker.scopes.enter(leases[0].id)):
        yield


def note_fetched(reference: int, owner: int) -> None:
    """Note that a value to be differentiated has come from its owner, if this code is in a context."""
    scope, here = current_scope(), current_worker().rank
    if scope is None or owner == here:
        return
    what = f"value of {spell(reference)}"
    link = Link(next_message(), owner, here, what, caused_by=cause(), reference=reference)
    scope.content(Tape).links.append(link)  # the receiver notes the link: the owner does not know of it


def note_contribution(owner: int, reference: int, number: int) -> None:
    """Note that a contribution goes to the owner of its value, if that is another worker."""
    here = current_worker().rank
    if owner != here:
        what, by = f"gradient of {spell(reference)}", cause()
        link = Link(number, here, owner, what, backward=True, caused_by=by, reference=reference)
        current_tape(lambda: "a gradient").links.append(link)
