"""The references of one worker: the claims it holds, the values it owns for others, and their release."""

import collections
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from jdistgrad import errors
from jdistgrad.rpc.caller import AnyWorker, Caller
from jdistgrad.rpc.claims import Claim, Drop, emptied, gifts_in
from jdistgrad.rpc.current import within
from jdistgrad.rpc.functions import Args, Kwargs, shown_as
from jdistgrad.rpc.mailbox import Mailbox, current_part
from jdistgrad.rpc.owned import Owned, OwnerTable
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.rpc.weights import NOTHING, WHOLE, Accounts, Weight
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Kind, Message, Parcel, worker_of

T = TypeVar("T")

log = logging.getLogger("jdistgrad.rpc")


class References:
    """The part of a worker that makes references, finds them and fetches their values.

    Attributes:
      owned: the values that this worker owns.
      claims: the claims that it holds, by reference; ``drops``: the weights of those that have died and that the owners
        have not been told of.
      accounts: the weight that went to each worker and came from it, in a world that survives.
      forgettings: the workers, and references that they may forget, which have not been told yet.
      forgettable: how many references each worker may forget, told of or still to be told; ``forgotten``: how many each
        owner has told this worker to forget.
    """

    def __init__(self, mailbox: Mailbox, caller: Caller):
        self._mailbox, self._caller = mailbox, caller
        self.owned, self.accounts, self._survives = OwnerTable(), Accounts(), mailbox.survives
        self.claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
        self.drops: collections.deque[Drop] = collections.deque()
        self._claiming = threading.Lock()
        self._noted_by: dict[int, set[int]] = {}  # who has accounts of a reference, by reference
        self.forgettings = collections.deque[tuple[int, int]]()
        self.forgettable = collections.Counter[int]()
        self.forgotten = collections.Counter[int]()
        if self._survives:
            mailbox.note_gifts = self._note_gifts

    def call_remote(self, to: AnyWorker, function: Any, args: Args, kwargs: Kwargs, timeout: float | None) -> Claim:
        """Make a value on another worker; return the claim to it."""
        identifier, owner = next(self._mailbox.ids), self._mailbox.directory.find(to).rank
        call = function, args, kwargs
        with put_off_interrupt():
            future = self._caller.start(Kind.REMOTE, identifier, owner, call, timeout)
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
            self.announce(claim.id).value.set_result(value)
            claim.add(WHOLE)
            return claim

    def announce(self, identifier: int) -> Owned:
        """Note that a value is being created here; return its entry."""
        creator = worker_of(identifier)
        if not self._survives or creator == self._mailbox.rank:
            return self.owned.announce(identifier)
        noted = self.accounts.give(creator, [(identifier, self._mailbox.rank, WHOLE)])
        entry = self.owned.announce(identifier, NOTHING if noted else WHOLE)
        if entry.freed:  # all of its weight was here before
            self._freed({identifier: entry})
        return entry

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

    def returned(self, source: int, parts: list[tuple[int, int, int, bool]]) -> list[Any]:
        """Take back weights that a worker has dropped, or returns in the place of a lost one, unless it is lost itself.

        Returns:
          The entries of values without references.
        """
        here, weights = (
            self._mailbox.rank,
            [(identifier, Weight(units, scale)) for identifier, units, scale, _ in parts],
        )
        if self._survives and source != here:
            if not self.accounts.give(source, [(identifier, here, weight) for identifier, weight in weights], -1):
                return []
            for identifier in [identifier for identifier, *_, noted in parts if noted]:
                self._noted_by.setdefault(identifier, set()).add(source)
        return self._freed(self.owned.release_all(weights))

    def dropped(self) -> dict[int, list[tuple[int, int, int, bool]]]:
        """Return the weights dropped here since the last call, by owner, and whether there are accounts of them."""
        noted = self.accounts.balances
        return _by_worker((owner, (one, w.units, w.scale, one in noted)) for owner, one, w in emptied(self.drops))

    # Accounts.

    def arrived(self, source: int, parcel: Parcel) -> list[Claim] | None:
        """Take over the weight in a message; return the claims, or None if the message is of a lost worker."""
        gifts = gifts_in(parcel)
        noted = self._survives and gifts and source != self._mailbox.rank
        if noted and not self.accounts.give(source, gifts, -1):
            return None
        return [self.claim(*gift) for gift in gifts]

    def _note_gifts(self, peer: int, parcel: Parcel) -> None:
        accounts, gifts, undo = self.accounts, gifts_in(parcel), parcel.undo
        assert undo is not None
        if not accounts.give(peer, gifts):
            raise errors.WorkerLostError(f"the worker of rank {peer} is lost", worker=peer)

        def take_back() -> None:
            if accounts.give(peer, gifts, -1):  # else the account was settled: the weight has gone to its owner
                undo()

        parcel.undo = take_back

    def lose(self, lost: int, error: BaseException) -> list[Owned]:
        """Hold what is owned here, and close the account with a lost worker; return the values it will not make."""
        self.owned.held = True
        self.accounts.close(lost)
        self.owned.release_all(self.accounts.settle(lost, self._mailbox.rank))
        return self._freed(self.owned.give_up(lost, error))

    def settle(self, lost: int, owner: int) -> list[tuple[int, int, int, bool]]:
        """Return the balances with a lost worker to the owner that asks for them, in the form of dropped weights."""
        return [(identifier, w.units, w.scale, False) for identifier, w in self.accounts.settle(lost, owner)]

    def sweep(self) -> list[Any]:
        """Return the entries of values that only lost workers held: all accounts with these are settled."""
        return self._freed(self.owned.sweep())

    def forget(self, owner: int, identifiers: list[int]) -> None:
        self.accounts.forget(identifiers)
        self.forgotten[owner] += len(identifiers)

    def _freed(self, entries: dict[int, Owned]) -> list[Any]:
        if self._survives and entries:
            self.accounts.forget(entries)
            for identifier in entries:
                noted_by = self._noted_by.pop(identifier, ())
                self.forgettings.extend((peer, identifier) for peer in noted_by)
                self.forgettable.update(noted_by)
        return list(entries.values())


def _by_worker(queue: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for worker, one in queue:
        found.setdefault(worker, []).append(one)
    return found


class Releasing:
    """The part of a worker that releases closed scopes and freed values, and returns dropped weights.

    Arguments:
      lost: the lost workers, which are not notified.

    Attributes:
      abandoned: the scopes to close at the next ``flush``. Garbage collection may append to it.
    """

    def __init__(self, mailbox: Mailbox, scopes: ScopeTable, references: References, lost: Collection[int]):
        self._mailbox, self._scopes, self._references, self._lost = mailbox, scopes, references, lost
        self.abandoned = collections.deque[int]()

    def close_scope(self, identifier: int) -> None:
        """Release a scope, here and on every worker that was called in it.

        Raises:
          WireError: one of them, or several, could not be told.
        """
        with put_off_interrupt():  # or a part of the workers might never be told
            scope = self._scopes.release(identifier)
            if scope is None:
                return
            peers, contents = scope.close()
            try:
                release = Message(Kind.RELEASE, self._mailbox.rank, identifier)
                self._tell_all([(peer, release) for peer in peers - {self._mailbox.rank, *self._lost}])
            finally:
                for content in contents:
                    content.close()

    def flush(self) -> None:
        """Close abandoned scopes, and return dropped weights to their owners."""
        here, references = self._mailbox.rank, self._references
        if not (self.abandoned or references.drops or references.forgettings):
            return
        with self._mailbox.work.under_way():  # until the messages count: the world might close before they are sent
            for identifier in emptied(self.abandoned):
                self.close_scope(identifier)
            dropped = [(owner, Message(Kind.DROP, here, 0, weights)) for owner, weights in references.dropped().items()]
            forgettings = _by_worker(emptied(references.forgettings))
            gone = [(peer, Message(Kind.FORGET, here, 0, values)) for peer, values in forgettings.items()]
            self._tell_all([*dropped, *gone])

    def _tell_all(self, messages: Iterable[tuple[int, Message]]) -> None:
        """Send messages to workers. One that cannot be sent keeps no other back, but is an error."""
        failed = []
        for peer, message in messages:
            try:
                self.tell(peer, message)
            except errors.WireError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def tell(self, peer: int, message: Message) -> None:
        try:
            with put_off_interrupt():
                self._mailbox.post(peer, message)
        except (errors.WorkerLostError, errors.WorldClosedError):
            log.debug("%s: rank %d has gone before it could be told of %s", self._mailbox.info, peer, message.kind.name)


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
