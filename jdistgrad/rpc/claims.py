"""The claims of one worker: the weight it holds of each reference, however many RRef objects stand for it.

Copying a reference gives a part of its weight away and sends no message; dropping a reference returns its weight. In
messages, this weight travels next to the pickle stream (``Parcel.attached``).
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import pickle
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from jdistgrad.errors import EncodingError, StaleReferenceError
from jdistgrad.leaves import LeafSpec
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.owned import Weight

T = TypeVar("T")

Drop = tuple[int, int, Weight]  # owner, id, weight


class Key(NamedTuple):
    """The identity of a reference, which does not keep the value alive: JAX keeps keys in its caches for ever."""

    id: int
    owner: int
    world: str

    def __repr__(self) -> str:  # JAX shows it where trees of different references are mapped together
        return f"<a reference to a value on rank {self.owner}; jd.tree_map(f, *trees) maps over trees of references>"


class MissingClaim:
    """A placeholder for the claim of a reference that is not held here, or belongs to no open world."""

    def __init__(self, key: Any):
        self.key, self.created = key, None
        self.owner, self.id = key.owner, getattr(key, "id", None)

    def __getattr__(self, name: str) -> Any:
        raise StaleReferenceError(
            f"a reference ({self.key}) is used where nobody holds it any more: its world was closed, or the RRef it "
            "was made from is gone. Keep that RRef while its copies are in use."
        )


@dataclasses.dataclass(eq=False)
class StandIn:
    """A placeholder for a claim, with zeros for the value, while a function is traced before the value exists."""

    owner: int
    layout: Any
    shapes: Any
    created = world = None
    id = 0

    @property
    def key(self) -> "StandIn":
        return self

    def value(self) -> Any:
        return self.layout.fill([LeafSpec.of(one).zeros() for one in self.shapes])


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimeKey:
    """The key of a reference made in code that JAX stages. An array, its token, holds the reference's id at run time.

    ``results``: the known shapes of the value, for the layer that staged the code. ``world`` is None, as the code may
    run in another world than the one it was traced in.
    """

    owner: int
    results: Any
    world: None = None


def emptied(queue: collections.deque[T]) -> Iterator[T]:
    """Take all that is in a queue, which other threads may empty at the same time."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


class Claim:
    """A share of one reference. When the last RRef that uses the claim dies, its weight is queued for the owner."""

    __slots__ = ("__weakref__", "_drops", "_lock", "_weight", "arrived", "created", "id", "key", "mailbox", "owner")

    def __init__(self, identifier: int, owner: int, weight: Weight, mailbox: Mailbox, drops: collections.deque[Drop]):
        self.id, self.owner, self.mailbox = identifier, owner, mailbox
        self.key = Key(identifier, owner, mailbox.world)
        self._weight, self._drops = weight, drops
        self.created: concurrent.futures.Future[Any] | None = None  # set where the call was made
        self.arrived = False  # whether the value is known to exist: it was fetched once, or its creation succeeded
        self._lock = threading.Lock()

    @property
    def is_made(self) -> bool:
        """Return whether the value is known to exist on its owner."""
        if not self.arrived and self.created is not None:
            done = self.created.done() and not self.created.cancelled()
            self.arrived = done and self.created.exception() is None
        return self.arrived

    def add(self, weight: Weight) -> None:
        with self._lock:
            self._weight = self._weight + weight

    def split(self) -> Weight:
        with self._lock:
            self._weight, given = self._weight.split()
            return given

    def __del__(self) -> None:
        # Garbage collection runs anywhere, also while locks are held: only an append is safe here.
        if self._weight:
            self._drops.append((self.owner, self.id, self._weight))


# References in messages.


class Shipment(list[tuple["Claim", Weight]]):
    """The references in one message, and the weight that each gives away.

    A receiver takes the weight over before it decodes anything, so no weight is lost if it cannot decode the message,
    or never opens it.
    """

    def take_back(self) -> None:
        for claim, weight in self:
            claim.add(weight)

    def attachment(self) -> bytes:
        return pickle.dumps([(c.id, c.owner, w.units, w.scale) for c, w in self]) if self else b""


def ship(claim: Claim) -> int:
    """Add a share of a reference to the shipment of the value being encoded; return its number there.

    Raises EncodingError if no value is being encoded: a reference has no meaning in an ordinary pickle.
    """
    shipment: Shipment | None = getattr(encoding.place, "held", None)
    if shipment is None:
        raise EncodingError(
            "a remote reference can only travel inside a call of jdistgrad: its owner would not know of a copy pickled "
            "by itself. Send it as an argument or a result, or save rref.to_here() instead."
        )
    shipment.append((claim, claim.split()))
    return len(shipment) - 1


class encoding:  # noqa: N801 used like a function
    """A block in which the references that this thread pickles join a shipment; with None they are refused."""

    __slots__ = ("_held", "_outer")
    place = threading.local()

    def __init__(self, held: Any):
        self._held = held

    def __enter__(self) -> None:
        self._outer = getattr(self.place, "held", None)
        self.place.held = self._held

    def __exit__(self, *error: object) -> None:
        self.place.held = self._outer


class decoding(encoding):  # noqa: N801
    """A block in which this thread decodes a value that came with these claims."""

    __slots__ = ()
    place = threading.local()
