"""The weight of references this worker holds, one claim for each id however many RRef objects stand for it."""

import collections
import concurrent.futures
import dataclasses
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from jdistgrad._compat import weakly_typed
from jdistgrad.errors import StaleReferenceError
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.references.weights import Weight

Drop = tuple[int, int, Weight]  # owner, id, weight


class Key(NamedTuple):
    """What identifies a reference without keeping its value alive: JAX keeps these for ever, in its caches."""

    id: int
    owner: int
    world: str


class Missing:
    """In place of the claim of a reference that is not held here, or belongs to no open world."""

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
    """In place of a claim where a function is traced for its shapes and the value does not exist yet: zeros do."""

    created = world = None
    id = 0

    def __init__(self, owner: int, layout: Any, shapes: Any):
        self.owner, self.layout, self.shapes = owner, layout, shapes

    @property
    def key(self) -> "StandIn":
        return self

    def value(self) -> Any:
        return self.layout.fill([_zeros(one) for one in self.shapes])


class Claim:
    """A share of one reference. When the last RRef that uses it dies, its weight is ready to go home."""

    __slots__ = ("__weakref__", "_drops", "_lock", "_weight", "arrived", "created", "id", "mailbox", "owner")

    def __init__(self, identifier: int, owner: int, weight: Weight, mailbox: Mailbox, drops: collections.deque[Drop]):
        self.id, self.owner, self.mailbox = identifier, owner, mailbox
        self._weight, self._drops = weight, drops
        self.created: concurrent.futures.Future | None = None  # known where the call was made
        self.arrived = False  # whether the value is known to be there: it has come here once, or was made
        self._lock = threading.Lock()

    @property
    def key(self) -> Key:
        return Key(self.id, self.owner, self.mailbox.world)

    @property
    def is_made(self) -> bool:
        """Whether the value is known to be there."""
        if not self.arrived and self.created is not None:
            done = self.created.done() and not self.created.cancelled()
            self.arrived = done and self.created.exception() is None
        return self.arrived

    def add(self, weight: Weight) -> None:
        with self._lock:
            self._weight = self._weight + weight

    def split(self) -> Weight:
        """Give a part away."""
        with self._lock:
            self._weight, given = self._weight.split()
            return given

    def __del__(self) -> None:
        # Garbage collection runs anywhere, also under locks: only an append is safe here.
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
        """Take over some weight that arrived."""
        with self._lock:
            claim = self._claims.get(identifier)
            if claim is None:
                claim = self._claims[identifier] = Claim(identifier, owner, weight, self._mailbox, self._drops)
            else:
                claim.add(weight)
            return claim

    def find(self, identifier: int) -> Claim | None:
        """The claim to a reference held here."""
        with self._lock:
            return self._claims.get(identifier)

    def dropped(self) -> dict[int, list[tuple[int, Weight]]]:
        """What must go home since the last look, by owner."""
        home: dict[int, list[tuple[int, Weight]]] = {}
        while self._drops:
            owner, identifier, weight = self._drops.popleft()
            home.setdefault(owner, []).append((identifier, weight))
        return home

    def held(self) -> list[Claim]:
        return list(self._claims.values())


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimeKey:
    """The key of a reference made in code that JAX stages: which one it is, an array (its token) says at run time.

    ``results``: what is known of its value's shapes, for the layer that staged it. ``world``: that in which the code
    runs, which may be another one than it was traced in.
    """

    owner: int
    results: Any
    world: None = None
