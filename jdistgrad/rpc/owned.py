"""The values that a worker owns for references, and reference weights, which count the references held anywhere.

Weights are exact dyadic fractions, so that each can be split. The owner frees the value when all weight has returned:
there are no acknowledgements, no tree of copies and no races (Bevan 1987; Watson and Watson 1987). A weight of one unit
is split into finer units: ``units / 2**scale``, with 32 more bits. The coarsest units are given away first: else the
weight of a reference that goes to and fro would get 32 bits longer each time.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Iterable
from typing import Any

from jdistgrad.errors import StaleReferenceError
from jdistgrad.wire.interrupts import InterruptibleFuture
from jdistgrad.wire.message import spell, worker_of

REMEMBERED = 4096  # freed values, so that a fetch of one raises
FINER = 32  # bits


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A share of a reference: ``units / 2**scale``."""

    units: int
    scale: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        scale = max(self.scale, other.scale)
        return Weight((self.units << (scale - self.scale)) + (other.units << (scale - other.scale)), scale)

    def __sub__(self, other: "Weight") -> "Weight":
        return self + Weight(-other.units, other.scale)

    def __bool__(self) -> bool:
        return self.units != 0

    def split(self) -> tuple["Weight", "Weight"]:
        """Return the weight to keep and the weight to give away; their sum is this weight, and neither is zero."""
        held = self if self.units > 1 else Weight(self.units << FINER, self.scale + FINER)
        coarser = FINER * min(((held.units - 1).bit_length() - 1) // FINER, held.scale // FINER)
        given = Weight(1, held.scale - coarser)
        return held - given, given


NOTHING, WHOLE = Weight(0), Weight(1)


@dataclasses.dataclass(slots=True)
class Owned:
    """A value, or the promise of it, and the weight that its references hold."""

    value: concurrent.futures.Future[Any] = dataclasses.field(default_factory=InterruptibleFuture)
    outstanding: Weight = WHOLE
    announced: bool = False
    freed: bool = False
    lock: contextlib.AbstractContextManager[Any] | None = None  # held while a call changes the value


class OwnerTable:
    """The values by reference id. Messages about one reference may arrive in any order.

    A fetch or a drop can overtake the message that creates the value (they come from other workers, or the creating
    message carries large arrays), so each of these may be the first to mention an id. An entry ends when it has been
    announced and all of its weight has returned.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Owned] = {}
        self._freed: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._given_up: dict[int, BaseException] = {}  # by lost creator: the error of values that it has not announced
        self._lock = threading.Lock()

    def announce(self, identifier: int) -> Owned:
        """Note that the value is being created, and that its creator holds the whole weight; return the entry."""
        with self._lock:
            return self._release(identifier, NOTHING, announced=True)

    def value(self, identifier: int) -> concurrent.futures.Future[Any]:
        """Return the value, or the promise of it, for a holder of a reference."""
        with self._lock:
            entry = self.entries.get(identifier)
            error = None if entry is not None and entry.announced else self._why_gone(identifier)
            if error is None:
                return self.entries.setdefault(identifier, Owned()).value
        promise = InterruptibleFuture[Any]()
        promise.set_exception(error)
        return promise

    def _why_gone(self, identifier: int) -> BaseException | None:
        if identifier not in self._freed:
            return self._given_up.get(worker_of(identifier))
        return StaleReferenceError(
            f"the value of reference {spell(identifier)} is gone: nobody holds a reference to it any more. "
            "Keep the RRef while its value is being used."
        )

    def give_up(self, creator: int, error: BaseException) -> list[concurrent.futures.Future[Any]]:
        """Return the promises of values that a lost creator has not announced, for the caller to fail."""
        with self._lock:
            self._given_up[creator] = error
            never = [one for one, entry in self.entries.items() if not entry.announced and worker_of(one) == creator]
            return [self.entries.pop(identifier).value for identifier in never]

    def share(self, identifier: int) -> bool:
        """Add a whole weight for a new reference; return False if the value is gone."""
        with self._lock:
            entry = self.entries.get(identifier)
            if entry is not None:
                entry.outstanding = entry.outstanding + WHOLE
            return entry is not None

    def replace(self, identifier: int, value: object) -> None:
        """Put another value in place of an owned one. Workers that have fetched the old value keep it."""
        made = InterruptibleFuture[Any]()
        made.set_result(value)
        with self._lock:
            entry = self.entries.get(identifier)
            if entry is not None:
                entry.value = made

    def lock(self, identifier: int) -> contextlib.AbstractContextManager[Any]:
        """Return the lock under which calls change a value; it does nothing for a value that another worker owns."""
        with self._lock:
            entry = self.entries.get(identifier)
            if entry is None:
                return contextlib.nullcontext()
            entry.lock = entry.lock or threading.RLock()
            return entry.lock

    def release_all(self, returned: Iterable[tuple[int, Weight]]) -> list[Owned]:
        """Take back weights of references; return the entries that are now free, for the caller to destroy.

        Values may have destructors that use this table, so they must not die under the lock.
        """
        with self._lock:
            entries = [self._release(identifier, weight) for identifier, weight in returned]
            return [entry for entry in entries if entry.freed]

    def clear(self) -> None:
        with self._lock:
            entries, self.entries = self.entries, {}
        entries.clear()

    def _release(self, identifier: int, weight: Weight, *, announced: bool = False) -> Owned:
        entry = self.entries.setdefault(identifier, Owned())
        entry.announced = entry.announced or announced
        entry.outstanding = entry.outstanding - weight
        if entry.announced and not entry.outstanding:
            del self.entries[identifier]
            entry.freed = True
            self._freed[identifier] = None
            if len(self._freed) > REMEMBERED:
                self._freed.popitem(last=False)
        return entry
