"""What the workers of a world that survives do when one of them is lost. Other worlds do not load this module.

The calls and collectives that wait for the lost worker fail by themselves (``WorkerPart.on_lost``). Here its accounts
of references are settled, the contexts that it opened are let go, and those that it took part in fail what still waits
in them. The survivors tell each other whom they have lost, so that all give up the same workers.

A context may have reached this worker through the lost one alone, which would have told of its end. So each survivor
tells the opener of each context that it still takes part; the opener answers if the context has ended, or if it fails.

Every worker keeps accounts: it notes, for each other worker, the weight of references that it has given to that worker,
less the weight that came from there; both in messages that carry references. An owner also notes the whole weight that
a creator begins with, and the weight that comes back. Gifts to the owner itself are not noted, since with the owner the
value is gone.

When a worker dies, each survivor refuses its messages from then on, and so its own account with the dead is final. The
weight that the dead held, or that was on its way to or from it, is the sum of the survivors' accounts with it: what
they gave it, less what came back. So each survivor *closes* its account, and *settles*: it returns the balance, which
may be negative, to the owner of each reference, in the place of the dead. The order and the time of the settlements do
not matter, only that the owner frees nothing until it has all of them. No message on its way between survivors matters
either: no survivor's weight is counted, only weight that left for the dead.

A balance must not come to an owner that has freed the value: that owner could not tell it from that of a value that is
still to be announced, and would keep it for ever. So a survivor settles with an owner when the owner says that it has
lost the worker, from when on it frees nothing, and has been told to forget all that the owner freed before.

If a survivor dies before or after it has settled, the same sum holds for all that are dead together: what they gave
each other cancels out, and a settlement counts as weight that came from the worker that settled.
"""

import collections
import functools
import threading
from collections.abc import Iterable
from typing import Any

from jdistgrad import errors
from jdistgrad.rpc.caller import Caller
from jdistgrad.rpc.claims import Claim, emptied, gifts_in
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import Mailbox, WorkerPart
from jdistgrad.rpc.owned import NOTHING, WHOLE, Gift, Owned, OwnerTable, Weight
from jdistgrad.rpc.references import Parts, References
from jdistgrad.rpc.scopes import Scope
from jdistgrad.wire.message import Message, MessageType, Parcel, spell, worker_of
from jdistgrad.wire.transport import Task


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


class HeldTable(OwnerTable):
    """The values of a worker that may have to give up those of lost creators.

    Attributes:
      held: nothing is freed while settlements of accounts may come, in any order. ``sweep`` then frees what they leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        self._orphans: dict[int, BaseException] = {}  # by lost creator: the error of values that will never be made

    def sweep(self) -> dict[int, Owned]:
        """Return the entries that settlements have left free, for the caller to destroy."""
        with self._lock:
            free = {one: entry for one, entry in self.entries.items() if entry.announced and not entry.outstanding}
            for identifier, entry in free.items():
                self._drop_if_free(identifier, entry)
            return free

    def give_up(self, creator: int, error: BaseException) -> dict[int, Owned]:
        """Return the values of a lost creator that are not being made yet, by id, for the caller to fail them.

        Whoever asks for such a value later gets the error, even if a call of the lost worker still makes it.
        """
        with self._lock:
            self._orphans[creator] = error
            never = [one for one, entry in self.entries.items() if not entry.announced and worker_of(one) == creator]
            return {identifier: self.entries.pop(identifier) for identifier in never}

    def _why_gone(self, identifier: int) -> BaseException | None:
        return super()._why_gone(identifier) or self._orphans.get(worker_of(identifier))

    def _release(self, identifier: int, weight: Weight, *, announced: bool = False) -> Owned:
        if identifier not in self.entries and worker_of(identifier) in self._orphans:
            return Owned(announced=True, freed=True)  # nobody has it: it was given up
        return super()._release(identifier, weight, announced=announced)

    def _drop_if_free(self, identifier: int, entry: Owned) -> None:
        if not self.held:
            super()._drop_if_free(identifier, entry)


class AccountedReferences(References):
    """The references of a worker that keeps accounts of them.

    Attributes:
      accounts: the weight that went to each worker and came from it.
      forgettable: how many references each worker may forget, told of or still to be told; ``forgotten``: how many each
        owner has told this worker to forget.
    """

    owned: HeldTable

    def __init__(self, mailbox: Mailbox, caller: Caller):
        super().__init__(mailbox, caller)
        self.owned, self.accounts = HeldTable(), Accounts()
        self.accounted = self.accounts.balances
        self._noted_by: dict[int, set[int]] = {}  # who has accounts of a reference, by reference
        self.forgettable = collections.Counter[int]()
        self.forgotten = collections.Counter[int]()
        mailbox.note_gifts = self._note_gifts

    def announce(self, identifier: int) -> Owned:
        creator = worker_of(identifier)
        if creator == self._mailbox.rank:
            return super().announce(identifier)
        noted = self.accounts.give(creator, [(identifier, self._mailbox.rank, WHOLE)])
        entry = self.owned.announce(identifier, NOTHING if noted else WHOLE)
        if entry.freed:  # all of its weight was here before
            self._freed({identifier: entry})
        return entry

    def arrived(self, source: int, parcel: Parcel) -> list[Claim] | None:
        gifts = gifts_in(parcel)
        if gifts and source != self._mailbox.rank and not self.accounts.give(source, gifts, -1):
            return None
        return [self.claim(*gift) for gift in gifts]

    def returned(self, source: int, parts: Parts) -> list[Owned]:
        """Take back weights, also those that a worker returns in the place of a lost one, unless it is lost itself."""
        here, weights = self._mailbox.rank, [(one, Weight(units, scale)) for one, units, scale, _ in parts]
        if source != here:
            if not self.accounts.give(source, [(one, here, weight) for one, weight in weights], -1):
                return []
            for one in [one for one, *_, noted in parts if noted]:
                self._noted_by.setdefault(one, set()).add(source)
        return self._freed(self.owned.release_all(weights))

    def news(self) -> list[tuple[int, Message]]:
        """Return what other workers have not been told: the weights dropped here, and what they may forget."""
        gone = dict[int, list[int]]()
        for peer, identifier in emptied(self.forgettings):
            gone.setdefault(peer, []).append(identifier)
        told = [(peer, Message(MessageType.FORGET, self._mailbox.rank, 0, values)) for peer, values in gone.items()]
        return [*super().news(), *told]

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

    def settle(self, lost: int, owner: int) -> Parts:
        """Return the balances with a lost worker to the owner that asks for them, in the form of dropped weights."""
        return [(identifier, w.units, w.scale, False) for identifier, w in self.accounts.settle(lost, owner)]

    def sweep(self) -> list[Owned]:
        """Return the entries of values that only lost workers held: all accounts with these are settled."""
        return self._freed(self.owned.sweep())

    def forget(self, owner: int, identifiers: list[int]) -> None:
        self.accounts.forget(identifiers)
        self.forgotten[owner] += len(identifiers)

    def _freed(self, entries: dict[int, Owned]) -> list[Owned]:
        self.accounts.forget(entries)
        for identifier in entries:
            noted_by = self._noted_by.pop(identifier, ())
            self.forgettings.extend((peer, identifier) for peer in noted_by)
            self.forgettable.update(noted_by)
        return list(entries.values())


class Losses(WorkerPart):
    """The lost workers, as one worker deals with them. It is busy until all accounts with them are settled.

    Arguments:
      worker: a ``Worker``, of a layer above.
    """

    def __init__(self, worker: Any):
        self._worker, self._peers, self._references = worker, worker.peers, worker.references
        self._releasing, self._scopes = worker.releasing, worker.scopes
        self._lost = set[int]()
        self._settled: set[tuple[int, int]] = set()  # settlements that have come: survivor and lost worker
        self.busy = False
        self._asked: list[tuple[int, int, int]] = []  # lost worker, owner that asks to settle, what to forget before
        self._lock = threading.RLock()

    def take(self, message: Message) -> Task | None:
        """Take a message that is about a loss."""
        worker = self._worker
        if message.kind is MessageType.LOST and message.id == worker.rank:
            text = f"the other workers go on without {worker.info}, says rank {message.source}: {message.body[0]}"
            worker.given_up_by.add(message.source)
            worker.fail(errors.WorkerLostError(text, worker=worker.info))
            return None
        if message.kind in (MessageType.PARTAKE, MessageType.BREAK):
            handle = self._takes_part if message.kind is MessageType.PARTAKE else self._broken
            task: Task = worker.work.counted(functools.partial(handle, message))
            return task
        handlers = {
            MessageType.LOST: self._lost_elsewhere,
            MessageType.SETTLE: self._take_settlement,
            MessageType.FORGET: self._forget,
        }
        handlers[message.kind](message)
        return None

    def awaited(self) -> set[int]:
        return {survivor for survivor, _ in self._open_settlements()} if self.busy else set()

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        with self._lock:
            if peer.rank not in self._lost:
                self._lost.add(peer.rank)
                self._settle(peer.rank)

    # References.

    def _settle(self, lost: int) -> None:
        worker, why, self.busy = self._worker, self._peers.reasons[lost], True
        worker.tell(lost, Message(MessageType.LOST, worker.rank, lost, (why, 0, False)))  # it may only stand still
        worker.transport.lose(lost)
        info, text = worker.directory.workers[lost], f"the value was not made: {self._peers.lost[lost]}"
        error = errors.WorkerLostError(text, worker=info)
        for entry in self._references.lose(lost, error):
            worker.run_counted(functools.partial(entry.value.set_exception, error))
        for peer in self._peers.others:
            count = self._references.forgettable[peer]
            worker.tell(peer, Message(MessageType.LOST, worker.rank, lost, (why, count, lost in self._peers.silent)))
        self._scopes.lost.add(lost)
        worker.run_counted(functools.partial(self._let_go_of_contexts, lost))
        self._end_hold()

    def _lost_elsewhere(self, message: Message) -> None:
        """Lose a worker that another has lost, which asks for the settlement of what it owns."""
        lost, (why, count, silent) = message.id, message.body
        (self._peers.lose_silent if silent else self._peers.lose)(lost, why)
        with self._lock:
            self._asked.append((lost, message.source, count))
            self._answer()

    def _forget(self, message: Message) -> None:
        """Forget references whose values are gone, as their owner says; it may wait with a settlement for that."""
        with self._lock:
            self._references.forget(message.source, message.body)
            self._answer()

    def _answer(self) -> None:
        """Settle with the owners that ask for it, once everything is forgotten that they freed before."""
        asked, self._asked = self._asked, []
        for lost, owner, count in asked:
            if self._references.forgotten[owner] >= count:
                balances = self._references.settle(lost, owner)
                self._worker.tell(owner, Message(MessageType.SETTLE, self._worker.rank, lost, balances))
            elif owner not in self._lost:
                self._asked.append((lost, owner, count))

    def _take_settlement(self, message: Message) -> None:
        with self._lock:
            self._references.returned(message.source, message.body)
            self._settled.add((message.source, message.id))
            self._end_hold()

    def _open_settlements(self) -> set[tuple[int, int]]:
        """Return the settlements that have not come, from survivors only. While any is open, no value is freed."""
        survivors = set(range(self._worker.size)) - self._lost - {self._worker.rank}
        return {(survivor, one) for survivor in survivors for one in self._lost} - self._settled

    def _end_hold(self) -> None:
        if not self._open_settlements():
            self._references.owned.held = False

    def tick(self, now: float) -> None:
        """Free what only lost workers held, when their calls, which may use it, have been served."""
        if not self.busy:
            return
        with self._lock:
            if not self._open_settlements() and not any(self._worker.work.serving[one] for one in self._lost):
                freed = self._references.sweep()
                self._worker.run_counted(freed.clear)
                self.busy = False

    # Contexts.

    def _let_go_of_contexts(self, lost: int) -> None:
        taking_part: dict[int, list[tuple[int, bool]]] = {}
        for identifier in self._scopes.identifiers():
            scope, opener = self._scopes.open.get(identifier), worker_of(identifier)
            if opener == lost:
                self._releasing.close_scope(identifier)
            elif scope is not None and opener == self._worker.rank:
                self._fail_if_lost(scope, lost, reached=lost in scope.peers())
            elif scope is not None:
                taking_part.setdefault(opener, []).append((identifier, lost in scope.peers()))
        for opener, contexts in taking_part.items():
            self._worker.tell(opener, Message(MessageType.PARTAKE, self._worker.rank, lost, contexts))

    def _takes_part(self, message: Message) -> None:
        """Answer a worker that takes part in contexts which were opened here."""
        for identifier, reached in message.body:
            scope = self._scopes.open.get(identifier)
            try:
                if scope is None:
                    raise errors.ContextError("closed")
                scope.includes(message.source)
            except errors.ContextError:
                self._worker.tell(message.source, Message(MessageType.RELEASE, self._worker.rank, identifier))
                continue
            if scope.error is not None:
                self._tell_failed(message.source, scope, message.id)
            self._fail_if_lost(scope, message.id, reached=reached)

    def _fail_if_lost(self, scope: Scope, lost: int, *, reached: bool) -> None:
        """Fail a context that was opened here, and that a lost worker took part in, on all that take part."""
        if reached and scope.error is None:
            scope.give_up(self._error(scope.id, lost))
            for peer in scope.peers():
                self._tell_failed(peer, scope, lost)

    def _tell_failed(self, peer: int, scope: Scope, lost: int) -> None:
        if peer not in self._lost and peer != self._worker.rank:
            self._worker.tell(
                peer, Message(MessageType.BREAK, self._worker.rank, scope.id, (lost, self._peers.reasons[lost]))
            )

    def _broken(self, message: Message) -> None:
        lost, why = message.body
        self._peers.lose(lost, why)
        scope = self._scopes.open.get(message.id)
        if scope is not None:
            scope.give_up(self._error(message.id, lost))

    def _error(self, context: int, lost: int) -> errors.WorkerLostError:
        text = (
            f"what is missing in context {spell(context)} will not come, since a worker that took part in it is lost: "
            f"{self._peers.lost[lost]}. Compute it again in a new context, without this worker."
        )
        return errors.WorkerLostError(text, worker=self._worker.directory.workers[lost], context=context)
