"""The tape, one worker's part of a context: recorded pullbacks, gradients, and links for a picture of the graph."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jdistgrad.autograd.tape import program_order
from jdistgrad.autograd.tape.ledger import CONTRIBUTION, REFERENCE, TAKEN, Contribution, Ledger, Node, total
from jdistgrad.autograd.tape.pullback_table import Recordings
from jdistgrad.errors import ContextError
from jdistgrad.rpc.current import current_scope
from jdistgrad.rpc.worker import current_worker
from jdistgrad.wire.ids import from_token, spell, worker_of

_serving: contextvars.ContextVar[int | None] = contextvars.ContextVar("jdistgrad_serving", default=None)


@contextlib.contextmanager
def serving(message: int, place: program_order.Place) -> Iterator[None]:
    """Mark a block as serving this message, at the message's place in the program's order."""
    token = _serving.set(message)
    try:
        with program_order.at(place):
            yield
    finally:
        _serving.reset(token)


def cause() -> int | None:
    """Return the id of the message being served here, or None."""
    return _serving.get()


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


def answer_link(message: int, call: int, what: str) -> Link:
    return Link(message, current_worker().rank, worker_of(call), what, False, call, call)


def _fetched_link(message: int, owner: int, here: int, cause: int | None, reference: int) -> list[Link]:
    return [Link(message, owner, here, f"value of {spell(reference)}", False, cause, None, reference)]


def _gradient_link(number: int, here: int, owner: int, cause: int | None, reference: int) -> list[Link]:
    return [Link(number, here, owner, f"gradient of {spell(reference)}", True, cause, None, reference)]


class Tape:
    """A worker's part of a context."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._links: list[Link | Callable[[], list[Link]]] = []
        self.kept: list[Any] = []  # references made inside compiled code: nothing else holds them
        self.recordings = Recordings()
        self._taken: dict[int, list[Contribution]] = {}
        self._replayed: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the pullbacks, and fail everything that waits for a pullback or a contribution."""
        self.recordings.close()
        self.ledger.give_up(ContextError("the context was closed while a gradient was being waited for"))

    @property
    def links(self) -> list[Link]:
        """Return the links of everything this worker sent."""
        with self._lock:
            count = len(self._links)  # other threads may append meanwhile
            made = [[one] if isinstance(one, Link) else one() for one in self._links[:count]]
            self._links[:count] = found = [link for links in made for link in links]
            return found

    def link_later(self, links: Callable[[], list[Link]]) -> None:
        """Note a function that makes links when they are read."""
        self._links.append(links)

    def link(self, message: int, to: int, what: str, *, backward: bool = False) -> None:
        self._links.append(Link(message, current_worker().rank, to, what, backward, _serving.get()))

    def link_answer(self, call: int, what: str) -> None:
        """Note that the results of a call go back to its caller."""
        self._links.append(answer_link(next_message(), call, what))

    def link_fetched(self, reference: int, owner: int) -> None:
        """Note that a value has come from its owner. The receiver notes the link: the owner does not know of it."""
        here = current_worker().rank
        if owner != here:
            self.link_later(functools.partial(_fetched_link, next_message(), owner, here, _serving.get(), reference))

    def link_gradient(self, number: int, owner: int, reference: int) -> None:
        """Note that a contribution goes to the owner of its value."""
        here = current_worker().rank
        self.link_later(functools.partial(_gradient_link, number, here, owner, _serving.get(), reference))

    def contribute(self, kind: str, identifier: int, contribution: Contribution) -> None:
        """Add to the gradient of a value, of a contribution, or of all the contributions in a sum that was taken."""
        if kind == TAKEN:
            with self._lock:
                contributions = self._taken[identifier]
            for one in contributions:
                self.ledger.put(Node(CONTRIBUTION, one.number), contribution)
        else:
            self.ledger.put(Node(kind, identifier), contribution)

    def taken(self, identifier: int, contributions: list[Contribution]) -> None:
        """Remember the contributions in a sum, for derivatives of the sum."""
        with self._lock:
            self._taken[identifier] = contributions

    def taken_before(self, identifier: int) -> list[Contribution] | None:
        with self._lock:
            return self._taken.get(identifier)

    def replayed(self, number: int, turn: int) -> int:
        """Return the id drawn at this turn of the replayed block: the same in every replay."""
        with self._lock:
            if (number, turn) not in self._replayed:
                self._replayed[number, turn] = next_message()
            return self._replayed[number, turn]

    def gradients(self) -> dict[int, list[Any]]:
        """Return, by reference, the sum of the contributions that no take has removed."""
        nodes = [node for node in self.ledger.nodes() if node.kind == REFERENCE]
        return {node.id: total(self.ledger.read(node)) for node in nodes}

    def gradient(self, identifier: int) -> list[Any] | None:
        """Return the same sum for one reference, or None if there are no contributions."""
        contributions = self.ledger.read(Node(REFERENCE, identifier))
        return total(contributions) if contributions else None

    def statistics(self) -> dict[str, int]:
        return {"recordings": len(self.recordings), "links": len(self.links)}


def next_message() -> int:
    """Draw a new message id of this worker."""
    return current_worker().messages.next()


_replay: contextvars.ContextVar[tuple[int, Iterator[int]] | None] = contextvars.ContextVar(
    "jdistgrad_replay", default=None
)


@contextlib.contextmanager
def replaying(number: int) -> Iterator[None]:
    """Give a block the same ids each time it runs: derivatives run a pullback again, but it contributes once."""
    token = _replay.set((number, itertools.count()))
    try:
        yield
    finally:
        _replay.reset(token)


def replaying_number(token: Any) -> contextlib.AbstractContextManager[None]:
    """Enter ``replaying`` by a token, unless the token is traced: code that is being compiled contributes nothing."""
    if isinstance(token, jax.core.Tracer):
        return contextlib.nullcontext()
    return replaying(*from_token(token))


def next_number() -> int:
    """Draw the id of the next contribution to a gradient, or of the next sum of contributions."""
    replay = _replay.get()
    if replay is None:
        return next_message()
    return current_tape(lambda: "a gradient").replayed(replay[0], next(replay[1]))


def current_tape(what: Callable[[], str]) -> Tape:
    """Return this worker's tape of the current context. Raises ContextError, naming ``what()``, outside any context."""
    scope = current_scope()
    if scope is None:
        raise ContextError(
            f"{what()} is differentiated outside any context. Put it inside `with jdistgrad.context() as ctx:`, or use "
            "jdistgrad.value_and_grad, which opens one itself (but not where JAX traces it: under jax.jit, vmap ...)."
        )
    return scope.content(Tape)


def note_fetched(reference: int, owner: int) -> None:
    """Note that a value to be differentiated has come from its owner, if this code is in a context."""
    scope = current_scope()
    if scope is not None:
        scope.content(Tape).link_fetched(reference, owner)
