"""References in messages: the weight they give away travels beside the pickle stream."""

import threading
from typing import Any

from jdistgrad.errors import EncodingError
from jdistgrad.rpc.references.claims import Claim, ClaimTable
from jdistgrad.rpc.references.weights import Weight
from jdistgrad.wire import plain
from jdistgrad.wire.message import Parcel

_encoding = threading.local()  # the shipment of the value that this thread is encoding
_decoding = threading.local()  # the references that came with the value that this thread is decoding


class Shipment:
    """The references in one message: what each of them gives away travels beside the pickle stream.

    A receiver takes it over before it decodes anything, so that nothing is lost of what it cannot decode, or never
    asks for.
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
        return plain.pack([(c.id, c.owner, w.units, w.scale) for c, w in self.given]) if self.given else b""


def ship(claim: Claim) -> int:
    """Called while a value is being encoded: give a share of a reference away. Its number in the shipment.

    Raises EncodingError outside an encoding: a reference has no meaning in an ordinary pickle.
    """
    shipment = getattr(_encoding, "held", None)
    if shipment is None:
        raise EncodingError(
            "a remote reference can only travel inside a call of jdistgrad: pickled by itself nobody would know of "
            "the copy. Send it as an argument or a result, or save rref.to_here() instead."
        )
    return shipment.add(claim)


def arrived(number: int) -> Claim:
    """Called while a value is being decoded: the claim that came as this number of its shipment."""
    return _decoding.held[number]


class _Holding:
    """A block in which this thread holds something."""

    __slots__ = ("_held", "_outer", "_place")

    def __init__(self, place: threading.local, held: Any):
        self._place, self._held = place, held

    def __enter__(self) -> None:
        self._outer = getattr(self._place, "held", None)
        self._place.held = self._held

    def __exit__(self, *error: object) -> None:
        self._place.held = self._outer


def encoding(shipment: Shipment | None) -> _Holding:
    """A block in which references that this thread pickles join a shipment; None: they are refused."""
    return _Holding(_encoding, shipment)


def decoding(claims: Any) -> _Holding:
    """A block in which this thread decodes a value that came with these references."""
    return _Holding(_decoding, claims)


def claims_of(parcel: Parcel, table: ClaimTable) -> list[Claim]:
    """Take over the references of a message that has arrived."""
    if not parcel.attached:
        return []
    arrivals = plain.unpack(parcel.attached)
    return [table.add(identifier, owner, Weight(units, scale)) for identifier, owner, units, scale in arrivals]
