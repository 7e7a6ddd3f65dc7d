"""The values a worker owns for references held anywhere: who may still ask, and what they will get."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Iterable

from jdistgrad.rpc.futures import Promise
from jdistgrad.rpc.references.weights import WHOLE, Weight


@dataclasses.dataclass(slots=True)
class Owned:
    """One value, or the promise of it, and the weight that is out with its references."""

    value: concurrent.futures.Future = dataclasses.field(default_factory=Promise)
    outstanding: Weight = WHOLE
    announced: bool = False
    freed: bool = False


class OwnerTable:
    """Values by reference id. Messages about one reference may arrive in any order.

    A fetch or a drop can overtake the message that creates the value (they come from other workers, or the
    creating message carries large arrays), so each of them may be the first to mention an id. An entry ends when it was
    announced and all of its weight has come back.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Owned] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def announce(self, identifier: int) -> Owned:
        """Somebody with the right to do so creates this value, and holds its whole weight."""
        with self._lock:
            entry = self._entry(identifier)
            entry.announced = True
            self._drop_if_free(identifier, entry)
            return entry

    def value(self, identifier: int) -> concurrent.futures.Future:
        """The value, or the promise of it, for somebody who holds a reference."""
        with self._lock:
            return self._entry(identifier).value

    def share(self, identifier: int) -> bool:
        """Give a new reference its whole weight; False where the value is gone."""
        with self._lock:
            entry = self._entries.get(identifier)
            if entry is not None:
                entry.outstanding = entry.outstanding + WHOLE
            return entry is not None

    def replace(self, identifier: int, value: object) -> None:
        """Give an owned value's place to another. Whoever has fetched the old one keeps it."""
        made = Promise()
        made.set_result(value)
        with self._lock:
            entry = self._entries.get(identifier)
            if entry is not None:
                entry.value = made

    def release_all(self, returned: Iterable[tuple[int, Weight]]) -> list[Owned]:
        """Some weight of references came back; the entries that are free now, for the caller to let go of.

        Values may have destructors that call in here: they must not die under the lock.
        """
        with self._lock:
            return [entry for identifier, weight in returned if (entry := self._release(identifier, weight)).freed]

    def identifiers(self) -> list[int]:
        with self._lock:
            return list(self._entries)

    def clear(self) -> None:
        with self._lock:
            entries, self._entries = self._entries, {}
        entries.clear()

    def _release(self, identifier: int, weight: Weight) -> Owned:
        entry = self._entry(identifier)
        entry.outstanding = entry.outstanding - weight
        self._drop_if_free(identifier, entry)
        return entry

    def _entry(self, identifier: int) -> Owned:
        entry = self._entries.get(identifier)
        if entry is None:
            entry = self._entries[identifier] = Owned()
        return entry

    def _drop_if_free(self, identifier: int, entry: Owned) -> None:
        if entry.announced and not entry.outstanding:
            del self._entries[identifier]
            entry.freed = True
