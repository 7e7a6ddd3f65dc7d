"""References in messages. The weight they give away travels beside the pickle stream."""

import pickle
import threading
from collections.abc import Iterable
from typing import Any

from jdistgrad.errors import EncodingError
from jdistgrad.rpc.references.accounts import Gift
from jdistgrad.rpc.references.claims import Claim, ClaimTable
from jdistgrad.rpc.references.weights import Weight
from jdistgrad.wire.message import Parcel

_encoding = threading.local()  # the shipment of the value that this thread is encoding
_decoding = threading.local()  # the references that came with the value that this thread is decoding


class Shipment:
    """The references in one message, and the weight that each gives away.

    A receiver takes the weight over before it decodes anything, so no weight is lost if it cannot decode the message,
    or never opens it.
    """

    def __init__(self) -> None:
        self.given: list[tuple[Claim, Weight]] = []

    def add(self, claim: Claim) -> int:
        self.given.append((claim, claim.split()))
        return len(self.given) - 1

    def take_back(self) -> None:
        for claim, weight in self.given:
            claim.add(weight)

    def attachment(self) -> bytes:
        return pickle.dumps([(c.id, c.owner, w.units, w.scale) for c, w in self.given]) if self.given else b""


def ship(claim: Claim) -> int:
    """Add a share of a reference to the shipment of the value being encoded; return its number there.

    Raises EncodingError if no value is being encoded: a reference has no meaning in an ordinary pickle.
    """
    shipment: Shipment | None = getattr(_encoding, "held", None)
    if shipment is None:
        raise EncodingError(
            "a remote reference can only travel inside a call of jdistgrad: its owner would not know of a copy pickled "
            "by itself. Send it as an argument or a result, or save rref.to_here() instead."
        )
    return shipment.add(claim)


def arrived(number: int) -> Claim:
    """Return the claim with this number in the shipment of the value being decoded."""
    claim: Claim = _decoding.held[number]
    return claim


class _Holding:
    """A block in which ``held`` of a thread-local object has a given value."""

    __slots__ = ("_held", "_outer", "_place")

    def __init__(self, place: threading.local, held: Any):
        self._place, self._held = place, held

    def __enter__(self) -> None:
        self._outer = getattr(self._place, "held", None)
        self._place.held = self._held

    def __exit__(self, *error: object) -> None:
        self._place.held = self._outer


def encoding(shipment: Shipment | None) -> _Holding:
    """Let references that this thread pickles in the block join a shipment; with None they are refused."""
    return _Holding(_encoding, shipment)


def decoding(claims: Any) -> _Holding:
    """Let this thread decode, in the block, a value that came with these claims."""
    return _Holding(_decoding, claims)


def gifts_in(parcel: Parcel) -> list[Gift]:
    """Return the weight that a message carries."""
    if not parcel.attached:
        return []
    return [(one, owner, Weight(units, scale)) for one, owner, units, scale in pickle.loads(parcel.attached)]


def claims_of(gifts: Iterable[Gift], table: ClaimTable) -> list[Claim]:
    """Take over the weight that has come with a message; return the claims."""
    return [table.add(identifier, owner, weight) for identifier, owner, weight in gifts]
