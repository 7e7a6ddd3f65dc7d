"""Weights of references, and the accounts of them by which the weight that a lost worker held can be returned.

Weights are exact dyadic fractions, so that each can be split. The owner's value is free when all weight has returned:
there are no acknowledgements, no tree of copies and no races (Bevan 1987; Watson and Watson 1987). The classic
weakness, a weight of one that cannot be halved, is solved by finer units instead of a message: ``units / 2**scale``,
and 32 more bits whenever the last unit is split. The coarsest units are given away first: else the weight of a
reference that goes to and fro would get 32 bits longer each time.

Every worker keeps accounts: it notes, for each other worker, the weight of references that it has given to that worker,
less the weight that came from there; both in messages that carry references. An owner also notes the whole weight that
a creator begins with, and the weight that comes back. Gifts to the owner itself are not noted, since with the owner the
value is gone.

When a worker dies, each survivor refuses its messages from then on, and so its own account with the dead is final. The
weight that the dead held, or that was on its way to or from it, is the sum of the survivors' accounts with it: what
they gave it, less what came back. So each survivor *closes* its account, and *settles*: it returns the balance, which
may be negative, to the owner of each reference, in the place of the dead. The order and the time of the settlements do
not matter, only that the owner frees nothing until it has all of them (``Losses``). No message on its way between
survivors matters either: no survivor's weight is counted, only weight that left for the dead.

A balance must not come to an owner that has freed the value: that owner could not tell it from that of a value that is
still to be announced, and would keep it for ever. So a survivor settles with an owner when the owner says that it has
lost the worker, from when on it frees nothing, and has been told to forget all that the owner freed before.

If a survivor dies before or after it has settled, the same sum holds for all that are dead together: what they gave
each other cancels out, and a settlement counts as weight that came from the worker that settled.
"""

import dataclasses
import threading
from collections.abc import Iterable

FINER = 32


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

Gift = tuple[int, int, Weight]  # the id of a reference, its owner, and the weight


class Accounts:
    """The accounts of one worker with all others. Safe from any thread.

    Attributes:
      balances: by reference, and by worker.
    """

    def __init__(self) -> None:
        self.balances: dict[int, dict[int, Weight]] = {}
        self._owners: dict[int, int] = {}  # by reference
        self._closed: set[int] = set()
        self._lock = threading.Lock()

    def give(self, peer: int, gifts: Iterable[Gift], sign: int = 1) -> bool:
        """Note weight that goes to a worker (``sign`` -1: comes from it); return False if that account is closed."""
        with self._lock:
            if peer in self._closed:
                return False
            for identifier, owner, weight in gifts:
                if owner not in (peer, *self._closed):
                    self._owners[identifier] = owner
                    self._change(identifier, peer, weight if sign > 0 else NOTHING - weight)
            return True

    def close(self, lost: int) -> None:
        """Let the account with a lost worker take no more entries, and forget the references that it owned."""
        with self._lock:
            self._closed.add(lost)
            for identifier in [one for one, owner in self._owners.items() if owner == lost]:
                self._forget(identifier)

    def settle(self, lost: int, owner: int) -> list[tuple[int, Weight]]:
        """Clear the closed account with a lost worker of an owner's references; return the balances."""
        with self._lock:
            owned = [identifier for identifier, of in self._owners.items() if of == owner]
            balances = [(one, self.balances[one][lost]) for one in owned if lost in self.balances[one]]
            for identifier, weight in balances:
                self._change(identifier, lost, NOTHING - weight)
            return balances

    def forget(self, identifiers: Iterable[int]) -> None:
        with self._lock:
            for identifier in identifiers:
                self._forget(identifier)

    def _change(self, identifier: int, peer: int, weight: Weight) -> None:
        balances = self.balances.setdefault(identifier, {})
        balances[peer] = balances.get(peer, NOTHING) + weight
        if not balances[peer]:
            del balances[peer]
        if not balances:
            self._forget(identifier)

    def _forget(self, identifier: int) -> None:
        self.balances.pop(identifier, None)
        self._owners.pop(identifier, None)
