"""The references of one worker: the claims it holds, and the values it owns for others."""

import concurrent.futures
from typing import Any

from jdistgrad.rpc.calls.caller import AnyWorker, Caller
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.mailbox import Mailbox, current_part
from jdistgrad.rpc.references.claims import Claim, ClaimTable, Key
from jdistgrad.rpc.references.owned import OwnerTable
from jdistgrad.rpc.references.weights import NOTHING, WHOLE, Weight
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Kind


class References:
    """The part of a worker that makes references, finds them and fetches their values."""

    def __init__(self, mailbox: Mailbox, caller: Caller):
        self._mailbox, self._caller = mailbox, caller
        self.owned, self.claims = OwnerTable(), ClaimTable(mailbox)

    def call_remote(self, to: AnyWorker, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Claim:
        """Make a value on another worker; return the claim to it."""
        identifier, owner = self._mailbox.ids.next(), self._mailbox.directory.find(to).rank
        call = function, args, kwargs
        with put_off_interrupt():
            future = self._caller.start(Kind.REMOTE, identifier, owner, call, timeout, snapshot=True)
            claim = self.claims.add(identifier, owner, WHOLE)
            claim.created = future
            return claim

    def own(self, value: Any) -> Claim:
        """Keep a value here; return the claim to it."""
        with put_off_interrupt():
            claim = self.claim_new(self._mailbox.rank)
            self.owned.announce(claim.id).value.set_result(value)
            claim.add(WHOLE)
            return claim

    def share(self, identifier: int) -> Claim | None:
        """Return a claim to a value that this worker owns, or None if the value is gone."""
        with put_off_interrupt():
            there = self.owned.share(identifier)
            return self.claims.add(identifier, self._mailbox.rank, WHOLE) if there else None

    def claim_new(self, owner: int) -> Claim:
        """Return a claim without weight to a value that its owner does not know yet.

        The caller gives the claim the whole weight when the owner knows the value, or soon will.
        """
        return self.claims.add(self._mailbox.ids.next(), owner, NOTHING)

    def find(self, key: Key) -> Claim | None:
        """Return the claim of a reference, or None if it is of another world or not held here."""
        return self.claims.find(key.id) if key.world == self._mailbox.world else None

    def fetch(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future[Any]:
        """Return a future of a claim's value."""
        if claim.owner == self._mailbox.rank and self.owned.value(claim.id).done():
            return self.owned.value(claim.id)
        with within(None):
            return self._caller.rpc_async(claim.owner, value_of, (claim.id,), {}, timeout)

    def creation(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future[Any]:
        """Return a future that is done when a claim's value has been made."""
        if claim.created is not None and timeout is None:
            return claim.created
        with within(None):
            return self._caller.rpc_async(claim.owner, creation_of, (claim.id,), {}, timeout)

    def returned(self, weights: list[tuple[int, int, int]]) -> list[Any]:
        """Take back weights of references; return the entries of values without references."""
        return self.owned.release_all([(identifier, Weight(units, scale)) for identifier, units, scale in weights])


# Functions that every worker serves for the references of other workers.


def value_of(identifier: int) -> concurrent.futures.Future[Any]:
    """Return the future of a reference's value."""
    return current_part(References).owned.value(identifier)


def creation_of(identifier: int) -> concurrent.futures.Future[Any]:
    """Return a future, with the result None, that is done when the value has been made."""
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def pass_on(value: concurrent.futures.Future[Any]) -> None:
        error = value.exception()
        made.set_result(None) if error is None else made.set_exception(error)

    value_of(identifier).add_done_callback(pass_on)
    return made
