"""A worker: what its parts have in common. Everything that decides lives in the parts."""

import concurrent.futures
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad import errors
from jdistgrad.rpc import current, devices
from jdistgrad.rpc.being_served import BeingServed
from jdistgrad.rpc.calls.caller import Caller, Target
from jdistgrad.rpc.calls.pending import Pending
from jdistgrad.rpc.calls.server import Served, creation_of, value_of
from jdistgrad.rpc.directory import Directory
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.members.closing import Closing
from jdistgrad.rpc.members.peers import Peers
from jdistgrad.rpc.members.watchdog import Watchdog
from jdistgrad.rpc.members.work_count import Traffic
from jdistgrad.rpc.references.claims import Claim, ClaimTable, Key
from jdistgrad.rpc.references.in_messages import claims_of
from jdistgrad.rpc.references.owned import OwnerTable
from jdistgrad.rpc.references.releasing import LettingGo
from jdistgrad.rpc.references.weights import NOTHING, WHOLE, Weight
from jdistgrad.rpc.scopes import ScopeTable
from jdistgrad.threads import ThreadPool
from jdistgrad.wire.ids import IdSource
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import ANSWERS, CALLS, WORK, Kind, Message, Parcel
from jdistgrad.wire.severed import Severed
from jdistgrad.wire.transport import Codec, Task, Transport

log = logging.getLogger("jdistgrad.rpc")


@dataclasses.dataclass(frozen=True)
class Process:
    """What a worker can have done by the process it lives in.

    Arguments:
      end_job: ends all ranks, because of something; does nothing where the workers are threads.
      report: prints an exception that this worker leaves with; likewise.
    """

    end_job: Callable[[str], None]
    report: Callable[[BaseException], None]


class Worker:
    """One worker of a world.

    Whichever thread moves messages calls ``receive`` and ``tick``; neither waits nor runs users' code. Calls are served
    on threads that may wait, answers are opened by whoever asked.
    """

    def __init__(
        self,
        world: str,
        rank: int,
        directory: Directory,
        transport: Transport,
        codec: Codec,
        *,
        timeout: float,
        process: Process,
        device: jax.Device | None = None,
    ):
        self.world, self.rank, self.directory = world, rank, directory
        self.info, self.size = directory.workers[rank], len(directory.workers)
        self.timeout, self.device, self.process = timeout, device, process
        self.shares_process = transport.hands_over and self.size > 1
        self.transport: Transport = transport
        self._codec = codec
        self._ids = IdSource(rank)
        self._threads = ThreadPool(f"jdistgrad-{self.info.name}", self.enter_thread)
        self.traffic, self.serving = Traffic(), BeingServed()
        self.calls = Caller(self)
        self.owned, self.claims = OwnerTable(), ClaimTable(self)
        self.scopes, self.messages = ScopeTable(rank), IdSource(rank)
        self.slots, self.letting_go = current.Slots(), LettingGo(self)
        self.peers = Peers(self)
        self.closing = Closing(self)
        self.watchdog, self.home = Watchdog(self), threading.get_ident()
        self.handled_before = id(sys.exception())  # a world may stand inside an ``except`` block
        self.failure: BaseException | None = None
        self.closed = self.severed = False

    # Calls and references.

    def rpc_sync(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Any:
        future = self.calls.start(Kind.CALL, self._ids.next(), to, (function, args, kwargs), timeout, snapshot=False)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def rpc_async(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> CallFuture:
        return self.calls.start(Kind.CALL, self._ids.next(), to, (function, args, kwargs), timeout, snapshot=True)

    def call_remote(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Claim:
        """Have a value made on another worker; the claim to it."""
        identifier, owner = self._ids.next(), self.directory.find(to).rank
        with put_off_interrupt():
            future = self.calls.start(Kind.REMOTE, identifier, owner, (function, args, kwargs), timeout, snapshot=True)
            claim = self.claims.add(identifier, owner, WHOLE)
            claim.created = future
            return claim

    def own(self, value: Any) -> Claim:
        """Keep a value here; the claim to it."""
        with put_off_interrupt():
            claim = self.claim_new(self.rank)
            self.owned.announce(claim.id).value.set_result(value)
            claim.add(WHOLE)
            return claim

    def share(self, identifier: int) -> Claim | None:
        """A claim to a value this worker owns; None where it is gone."""
        with put_off_interrupt():
            return self.claims.add(identifier, self.rank, WHOLE) if self.owned.share(identifier) else None

    def claim_new(self, owner: int) -> Claim:
        """A claim to a value its owner has not heard of: to be given the whole weight when it has, or soon will."""
        return self.claims.add(self._ids.next(), owner, NOTHING)

    def find_claim(self, key: Key) -> Claim | None:
        """The claim a reference stands for, if it is of this world and held here."""
        return self.claims.find(key.id) if key.world == self.world else None

    def fetch(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future:
        """A claim's value."""
        if claim.owner == self.rank and self.owned.value(claim.id).done():
            return self.owned.value(claim.id)
        with current.within(None):
            return self.rpc_async(claim.owner, value_of, (claim.id,), {}, timeout)

    def creation(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future:
        """None, when a claim's value has been made."""
        if claim.created is not None and timeout is None:
            return claim.created
        with current.within(None):
            return self.rpc_async(claim.owner, creation_of, (claim.id,), {}, timeout)

    def cast(self, to: int, function: Any, args: tuple) -> None:
        """Have a function run on another worker. Nobody answers."""
        self.post(to, Message(Kind.CAST, self.rank, self._ids.next(), (function, args, {})))

    def check_usable(self, call: Pending) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise errors.NotInitializedError(f"{call}: this world has been shut down. Call jdistgrad.init() again.")
        self.peers.check(call)

    # Messages out and in.

    def post(self, peer: int, message: Message, *, snapshot: bool = True) -> None:
        """Send a message and keep count."""
        with put_off_interrupt():
            self.traffic.sending(message.kind)
            try:
                self.transport.send(peer, message, snapshot=snapshot)
            except BaseException:
                self.traffic.not_sent(message.kind)
                raise

    def receive(self, message: Message) -> Task | None:
        kind, body = message.kind, message.body
        if isinstance(body, Parcel):
            message.body = self._take_over(body)
        self.peers.heard(message.source)
        if kind in CALLS:
            self.traffic.serving()
            value = self.owned.announce(message.id).value if kind is Kind.REMOTE else None
            return Served(self, message, value).serve
        try:
            return self._take_note(message)
        finally:
            if kind in WORK:
                self.traffic.received()

    def _take_note(self, message: Message) -> Task | None:
        """Do what a message asks for that is no call, if it can be read: what answers nothing must not be guessed."""
        kind = message.kind
        if kind in ANSWERS:
            self.calls.answered(message)
        elif isinstance(message.body, errors.WireError):
            log.error("%s ignores a %s from rank %d: %s", self.info, kind.name, message.source, message.body)
        elif kind is Kind.RELEASE:
            self.traffic.started()
            return functools.partial(self.letting_go.closed_elsewhere, message.id)
        elif kind is Kind.DROP:
            self._returned(message.body)
        elif kind is Kind.PING:
            self.post(message.source, Message(Kind.PONG, self.rank, 0))
        elif kind is Kind.LEAVE:
            self.peers.lose(message.source, message.body)
        else:
            self.closing.handle(message)
        return None

    def _returned(self, weights: list[tuple[int, int, int]]) -> None:
        """Weights of references have come home."""
        freed = self.owned.release_all([(identifier, Weight(units, scale)) for identifier, units, scale in weights])
        if freed:
            self.traffic.started()
            self.run(functools.partial(self.letting_go.die, freed))

    def _take_over(self, parcel: Parcel) -> Parcel | errors.WireError:
        try:
            parcel.attached = claims_of(parcel, self.claims)
        except Exception as error:  # garbled bytes can do anything to pickle
            return errors.WireError(f"a message with garbled references arrived: {error}")
        return parcel

    def open(self, message: Message) -> Any:
        """A message's body, decoded if it came over a wire. Raises what the wire says is wrong with it."""
        body = message.body
        if isinstance(body, errors.WireError):
            raise body
        return self._codec.decode(body) if isinstance(body, Parcel) else body

    def wait_for(self, futures: Sequence[concurrent.futures.Future], timeout: float | None) -> None:
        """Return when one of some futures that messages will complete is done, or the time is over."""
        self.transport.wait_for(futures, timeout)

    def run(self, task: Task) -> None:
        self._threads.run(task)

    def enter_thread(self) -> None:
        current.bind_thread(self)

    def finish_programs(self) -> None:
        """Return when the programs that a function called have run, as far as it did not wait for them.

        Where workers have devices of their own, programs may be under way when the function returns. They may need
        its context; and XLA lets those of one thread run one after the other: the next call that this thread serves
        may be one that they wait for.
        """
        if self.device is not None:
            devices.finish_programs_of_this_thread()

    # Housekeeping.

    def tick(self, now: float) -> None:
        self.letting_go.flush()
        self.calls.expire(now)
        self.peers.look(self.calls.awaited() | self.closing.awaited() | self.watchdog.awaited(), now)
        self.watchdog.look(now)

    # The end.

    def fail(self, error: BaseException) -> None:
        """The world is broken: everything that waits in it ends with this error."""
        self.failure = self.failure or error
        self.calls.fail_all(lambda call: error)

    def sever(self, why: str) -> None:
        """In a forked process: whoever still holds something of this worker is told, and its end here is none."""
        self.closed = self.severed = True
        self.transport = Severed(self.transport, why)

    def close(self, *, graceful: bool) -> None:
        """Stop. Calls still in flight fail, references become stale."""
        self.closed = True
        self.calls.fail_all(lambda call: errors.WorldClosedError(f"{call}: the world was shut down meanwhile"))
        self.transport.close(graceful=graceful and self.failure is None)
        for identifier in self.scopes.identifiers():
            self.letting_go.close_scope(identifier)
        self._threads.close()
        self.owned.clear()
