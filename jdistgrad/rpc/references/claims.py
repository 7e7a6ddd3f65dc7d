"""The claims of one worker: the weight it holds of each reference, however many RRef objects stand for it."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jdistgrad._compat import weakly_typed
from jdistgrad.errors import StaleReferenceError
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.references.weights import Weight

T = TypeVar("T")

Drop = tuple[int, int, Weight]  # owner, id, weight


class Key(NamedTuple):
    """The identity of a reference, which does not keep the value alive: JAX keeps keys in its caches for ever."""

    id: int
    owner: int
    world: str


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


def _zeros(like: Any) -> Any:
    zeros = np.zeros(like.shape, like.dtype)
    return weakly_typed(zeros) if like.weak_type else zeros


class StandIn:
    """A placeholder for a claim, with zeros for the value, while a function is traced before the value exists."""

    created = world = None
    id = 0

    def __init__(self, owner: int, layout: Any, shapes: Any):
        self.owner, self.layout, self.shapes = owner, layout, shapes

    @property
    def key(self) -> "StandIn":
        return self

    def value(self) -> Any:
        return self.layout.fill([_zeros(one) for one in self.shapes])


def emptied(queue: collections.deque[T]) -> Iterator[T]:
    """Take all that is in a queue, which other threads may empty at the same time."""
    with contextlib.suppress(IndexError):
        while True:
            yield queue.popleft()


class Claim:
    """A share of one reference. When the last RRef that uses the claim dies, its weight is queued for the owner."""

    __slots__ = ("__weakref__", "_drops", "_lock", "_weight", "arrived", "created", "id", "mailbox", "owner")

    def __init__(self, identifier: int, owner: int, weight: Weight, mailbox: Mailbox, drops: collections.deque[Drop]):
        self.id, self.owner, self.mailbox = identifier, owner, mailbox
        self._weight, self._drops = weight, drops
        self.created: concurrent.futures.Future[Any] | None = None  # set where the call was made
        self.arrived = False  # whether the value is known to exist: it was fetched once, or its creation succeeded
        self._lock = threading.Lock()

    @property
    def key(self) -> Key:
        return Key(self.id, self.owner, self.mailbox.world)

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
        """Split off a part of the weight, and return that part."""
        with self._lock:
            self._weight, given = self._weight.split()
            return given

    def __del__(self) -> None:
        # Garbage collection runs anywhere, also while locks are held: only an append is safe here.
        if self._weight:
            self._drops.append((self.owner, self.id, self._weight))


class ClaimTable:
    """The claims of one worker, by reference id."""

    def __init__(self, mailbox: Mailbox):
        self._mailbox = mailbox
        self._claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._drops: collections.deque[Drop] = collections.deque()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, identifier: int, owner: int, weight: Weight) -> Claim:
        """Add weight that arrived to the claim of a reference, and return the claim."""
        with self._lock:
            claim = self._claims.get(identifier)
            if claim is None:
                claim = self._claims[identifier] = Claim(identifier, owner, weight, self._mailbox, self._drops)
            else:
                claim.add(weight)
            return claim

    def find(self, identifier: int) -> Claim | None:
        """Return the claim to a reference, or None if it is not held here."""
        with self._lock:
            return self._claims.get(identifier)

    @property
    def has_dropped(self) -> bool:
        return bool(self._drops)

    def dropped(self) -> dict[int, list[tuple[int, Weight]]]:
        """Return the weights dropped since the last call, by owner."""
        home: dict[int, list[tuple[int, Weight]]] = {}
        for owner, identifier, weight in emptied(self._drops):
            home.setdefault(owner, []).append((identifier, weight))
        return home

    def held(self) -> list[Claim]:
        return list(self._claims.values())


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimeKey:
    """The key of a reference made in code that JAX stages. An array, its token, holds the reference's id at run time.

    ``results``: the known shapes of the value, for the layer that staged the code. ``world`` is None, as the code may
    run in another world than the one it was traced in.
    """

    owner: int
    results: Any
    world: None = None
