"""The references of one worker: the claims it holds, the values it owns for others, and their release."""

import collections
import concurrent.futures
import pickle
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from jdistgrad.rpc.caller import AnyWorker, Caller
from jdistgrad.rpc.claims import Claim, Drop, emptied
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import Args, Kwargs, shown_as
from jdistgrad.rpc.mailbox import Mailbox, WorkerPart, current_part
from jdistgrad.rpc.owned import NOTHING, WHOLE, Owned, OwnerTable, Weight
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Message, MessageType, worker_of

Parts = list[tuple[int, int, int]]  # of references: id, units and scale of a weight


class References:
    """The part of a worker that makes references, finds them and fetches their values.

    Attributes:
      owned: the values that this worker owns.
      claims: the claims that it holds, by reference; ``drops``: the weights of dead claims that have not been
        returned to the owners yet.
    """

    def __init__(self, mailbox: Mailbox, caller: Caller):
        self._mailbox, self._caller = mailbox, caller
        self.owned = OwnerTable()
        self.claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
        self.drops: collections.deque[Drop] = collections.deque()
        self._claiming = threading.Lock()

    def call_remote(self, to: AnyWorker, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Claim:
        """Make a value on another worker; return the claim to it."""
        identifier, owner = next(self._mailbox.ids), self._mailbox.directory.find(to).rank
        call = function, args, kwargs
        with put_off_interrupt():
            future = self._caller.start(MessageType.REMOTE, identifier, owner, call, timeout)
            claim = self.claim(identifier, owner, WHOLE)
            claim.created = future
            return claim

    def claim(self, identifier: int, owner: int, weight: Weight) -> Claim:
        """Add weight that arrived to the claim of a reference, and return the claim."""
        with self._claiming:
            claim = self.claims.get(identifier)
            if claim is None:
                claim = self.claims[identifier] = Claim(identifier, owner, weight, self._mailbox, self.drops)
            else:
                claim.add(weight)
            return claim

    def own(self, value: Any) -> Claim:
        with put_off_interrupt():
            claim = self.claim_new(self._mailbox.rank)
            self.owned.announce(claim.id).value.set_result(value)
            claim.add(WHOLE)
            return claim

    def share(self, identifier: int) -> Claim | None:
        """Return a claim to a value that this worker owns, or None if the value is gone."""
        with put_off_interrupt():
            there = self.owned.share(identifier)
            return self.claim(identifier, self._mailbox.rank, WHOLE) if there else None

    def claim_new(self, owner: int) -> Claim:
        """Return a claim without weight to a value that its owner does not know yet.

        The caller gives the claim the whole weight when the owner knows the value, or soon will.
        """
        return self.claim(next(self._mailbox.ids), owner, NOTHING)

    def fetch(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future[Any]:
        """Return a future of a claim's value.

        Here, too, an error comes by a call, as a copy: the owner keeps the error, whose traceback, once it is raised,
        keeps the reference.
        """
        if claim.owner == self._mailbox.rank:
            value = self.owned.value(claim.id)
            if value.done() and value.exception() is None:
                return value
        with within(None):
            return self._caller.rpc_async(claim.owner, value_of, (claim.id,), {}, timeout)

    def creation(self, claim: Claim, sent: Any, timeout: float | None) -> concurrent.futures.Future[Any]:
        """Return a future that is done when a claim's value has been made.

        Arguments:
          sent: the reference, to be passed by reference: the caller may drop its own before the owner has been asked.
        """
        if claim.created is not None and timeout is None:
            return claim.created
        with within(None):
            return self._caller.rpc_async(claim.owner, creation_of, (sent,), {}, timeout)

    # Weight in messages.

    def arrived(self, attached: bytes) -> list[Claim]:
        """Take over the weight in a message; return the claims."""
        return [self.claim(one, owner, Weight(*weight)) for one, owner, *weight in pickle.loads(attached)]

    def returned(self, parts: Parts) -> list[Owned]:
        """Take back weights that a worker has dropped; return the entries of values without references."""
        return self.owned.release_all((identifier, Weight(units, scale)) for identifier, units, scale in parts)

    def dropped(self) -> list[tuple[int, Message]]:
        """Return messages that return the weights dropped here to the owners."""
        dropped = dict[int, Parts]()
        for owner, one, weight in emptied(self.drops):
            dropped.setdefault(owner, []).append((one, weight.units, weight.scale))
        return [(owner, Message(MessageType.DROP, self._mailbox.rank, 0, parts)) for owner, parts in dropped.items()]


class Releasing(WorkerPart):
    """The part of a worker that releases closed scopes and freed values, and returns dropped weights.

    Arguments:
      lost: the lost workers, which are not notified.

    Attributes:
      abandoned: the scopes to close at the next ``tick``. Garbage collection may append to it.
    """

    def __init__(self, mailbox: Mailbox, scopes: ScopeTable, references: References, lost: Collection[int]):
        self._mailbox, self._scopes, self._references, self._lost = mailbox, scopes, references, lost
        self.abandoned = collections.deque[int]()

    def close_scope(self, identifier: int) -> None:
        """Release a scope, here and on every worker that was called in it.

        Raises:
          WireError: some workers could not be notified.
        """
        with put_off_interrupt():  # or some workers might never be notified
            scope = self._scopes.release(identifier)
            if scope is None:
                return
            peers, contents = scope.close()
            if self._lost and worker_of(identifier) == self._mailbox.rank:  # which may have called others in it
                peers = set(range(self._mailbox.size))
            try:
                release = Message(MessageType.RELEASE, self._mailbox.rank, identifier)
                self._tell_all([(peer, release) for peer in peers - {self._mailbox.rank, *self._lost}])
            finally:
                for content in contents:
                    content.close()

    def tick(self, now: float = 0.0) -> None:
        """Close abandoned scopes, and return dropped weights to their owners."""
        if not (self.abandoned or self._references.drops):
            return
        with self._mailbox.work.under_way():  # until the messages count: the world might close before they are sent
            for identifier in emptied(self.abandoned):
                self.close_scope(identifier)
            self._tell_all(self._references.dropped())

    def _tell_all(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Send messages to workers. One that cannot be sent keeps no other back, but is an error."""
        failed = [error for peer, message in messages if (error := self._mailbox.tell(peer, message)) is not None]
        if failed:
            raise failed[0]


# Functions that every worker serves for the references of other workers.


@shown_as("the fetch of a reference's value")
def value_of(identifier: int) -> concurrent.futures.Future[Any]:
    return current_part(References).owned.value(identifier)


@shown_as("the wait for a reference's value to be made")
def creation_of(reference: Any) -> concurrent.futures.Future[Any]:
    """Return a future, with the result None, that is done when the value has been made."""
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def pass_on(value: concurrent.futures.Future[Any]) -> None:
        error = value.exception()
        made.set_result(None) if error is None else made.set_exception(error)

    value_of(reference.id).add_done_callback(pass_on)
    return made
