"""A worker: the place where calls start and end. Everything that decides lives in the parts it holds."""

import concurrent.futures
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.rpc import current
from jdistgrad.rpc.claims import Claim, ClaimTable
from jdistgrad.rpc.deadlines import Pending, PendingCalls
from jdistgrad.rpc.directory import Directory, WorkerInfo
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.liveness import Liveness
from jdistgrad.rpc.owner import OwnerTable
from jdistgrad.rpc.serving import Served, creation_of, value_of
from jdistgrad.rpc.threads import ThreadPool
from jdistgrad.rpc.traffic import Traffic
from jdistgrad.rpc.weights import WHOLE
from jdistgrad.wire.ids import IdSource
from jdistgrad.wire.message import Kind, Message, Parcel
from jdistgrad.wire.transport import Codec, Task, Transport

log = logging.getLogger("jdistgrad.rpc")

Target = str | int | WorkerInfo
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Worker:
    """One worker of a world.

    The transport's thread calls ``receive`` and ``tick``; neither waits nor runs users' code. Calls are served on the
    pool's threads, answers are opened by whoever waits for them.
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
        device: jax.Device | None = None,
    ):
        self.world, self.rank, self.directory = world, rank, directory
        self.info, self.size = directory.workers[rank], len(directory.workers)
        self.timeout, self.device = timeout, device
        self.transport, self._codec = transport, codec
        self.ids = IdSource(rank)
        self.calls, self.owned, self.claims = PendingCalls(), OwnerTable(), ClaimTable(self)
        self.traffic = Traffic()
        self.liveness = Liveness(settings.heartbeat_seconds, settings.silence_seconds)
        self.threads = ThreadPool(f"jdistgrad-{self.info.name}", self.enter_thread)
        self.control: Callable[[Message], None] = self._ignore
        self.awaited: Callable[[], set[int]] = set
        self.failure: BaseException | None = None
        self.closed = False
        self._lost: dict[int, str] = {}

    # Calls out.

    def rpc_sync(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Any:
        future = self._start(Kind.CALL, self.ids.next(), to, (function, args, kwargs), timeout, snapshot=False)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def rpc_async(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> CallFuture:
        return self._start(Kind.CALL, self.ids.next(), to, (function, args, kwargs), timeout, snapshot=True)

    def call_remote(self, to: Target, function: Any, args: tuple, kwargs: dict, timeout: float | None) -> Claim:
        """Have a value made on another worker; the claim to it."""
        identifier, owner = self.ids.next(), self.directory.find(to).rank
        self._start(Kind.REMOTE, identifier, owner, (function, args, kwargs), timeout, snapshot=True)
        return self.claims.add(identifier, owner, WHOLE)

    def _start(
        self, kind: Kind, identifier: int, to: Target, call: Call, timeout: float | None, *, snapshot: bool
    ) -> CallFuture:
        peer = self.directory.find(to)
        if not callable(call[0]):
            raise errors.FunctionError(f"a call needs a function, not {call[0]!r}")
        seconds = self.timeout if timeout is None else checked_timeout(timeout)
        future = CallFuture(self.transport.wait_for)
        pending = Pending(identifier, peer, self.info, call[0], seconds, time.monotonic() + seconds, future)
        self._check_usable(pending)
        self.calls.open(pending)
        try:
            self.post(peer.rank, Message(kind, self.rank, identifier, call), snapshot=snapshot)
        except (errors.EncodingError, errors.FunctionError) as error:
            self.calls.close(identifier)
            raise type(error)(f"cannot call {pending}: {error}") from error
        except BaseException:
            self.calls.close(identifier)
            raise
        return future

    def post(self, peer: int, message: Message, *, snapshot: bool = True) -> None:
        """Send a message and keep count."""
        self.traffic.sending(message.kind)
        try:
            self.transport.send(peer, message, snapshot=snapshot)
        except BaseException:
            self.traffic.not_sent(message.kind)
            raise

    def _check_usable(self, call: Pending) -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise errors.NotInitializedError(f"{call}: this world has been shut down. Call jdistgrad.init() again.")
        if call.peer.rank in self._lost:
            raise errors.WorkerLostError(f"{call}: {self._lost[call.peer.rank]}", worker=call.peer)

    # References.

    def own(self, value: Any) -> Claim:
        """Keep a value here and hold the whole weight of a reference to it."""
        identifier = self.ids.next()
        self.owned.announce(identifier).value.set_result(value)
        return self.claims.add(identifier, self.rank, WHOLE)

    def fetch(self, claim: Claim, timeout: float | None) -> Any:
        return self.fetching(claim, timeout).result()

    def fetching(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future:
        """The future of a reference's value."""
        if claim.owner == self.rank and self.owned.value(claim.id).done():
            return self.owned.value(claim.id)
        return self.rpc_async(claim.owner, value_of, (claim.id,), {}, timeout)

    def creation(self, claim: Claim, timeout: float | None) -> concurrent.futures.Future:
        return self.rpc_async(claim.owner, creation_of, (claim.id,), {}, timeout)

    # Messages in. Whichever thread moves messages runs this.

    def receive(self, message: Message) -> Task | None:
        self.liveness.heard(message.source, time.monotonic())
        kind = message.kind
        if kind in (Kind.RESULT, Kind.FAILURE):
            self._answered(message)
        elif kind in (Kind.CALL, Kind.REMOTE):
            self.traffic.serving(kind)
            value = self.owned.announce(message.id).value if kind is Kind.REMOTE else None
            return Served(self, message, value).serve
        elif kind is Kind.DROP:
            for identifier, weight in self.open(message):
                self.owned.release(identifier, weight)
            self.traffic.received(kind)
        elif kind is Kind.PING:
            self.post(message.source, Message(Kind.PONG, self.rank, 0))
        elif kind is Kind.LEAVE:
            self.lose(message.source, self.open(message))
        else:
            self.control(message)
        return None

    def run(self, task: Task) -> None:
        self.threads.run(task)

    def enter_thread(self) -> None:
        current.bind_thread(self)

    def open(self, message: Message) -> Any:
        """A message's body, decoded if it came over a wire."""
        body = message.body
        return self._codec.decode(body) if isinstance(body, Parcel) else body

    def _answered(self, message: Message) -> None:
        pending = self.calls.close(message.id)
        if pending is None:
            self.threads.run(self.open, message)  # too late for anybody; references inside must still be counted
        else:
            pending.future.answer(functools.partial(self._outcome, message), self.threads.run)
        self.traffic.received(message.kind)

    def _outcome(self, message: Message) -> Any:
        body = self.open(message)
        if message.kind is Kind.FAILURE:
            raise body.to_raise()
        return body

    def _ignore(self, message: Message) -> None:
        log.debug("%s: nobody waits for %s", self.info, message)

    # Housekeeping, on the transport's thread.

    def tick(self, now: float) -> None:
        self.flush_drops()
        for pending in self.calls.expire(now):
            self._fail_call(
                pending,
                errors.CallTimeoutError(
                    f"{pending}, was not answered within {pending.timeout:g} s. Give the call (timeout=) or the "
                    "world (init(timeout=)) more time if it may take that long.",
                    worker=pending.peer,
                    call=str(pending),
                    seconds=pending.timeout,
                ),
            )
        ask, lost = self.liveness.look((self.calls.peers() | self.awaited()) - {self.rank}, now)
        for peer in ask:
            self.post(peer, Message(Kind.PING, self.rank, 0))
        for peer in lost:
            self.lose(peer, f"it gave no sign of life for {self.liveness.limit:g} s")

    def flush_drops(self) -> None:
        for owner, dropped in self.claims.dropped().items():
            try:
                self.post(owner, Message(Kind.DROP, self.rank, 0, dropped))
            except errors.WorkerLostError:
                log.debug("%s: the owner of %d dropped references has gone", self.info, len(dropped))

    def _fail_call(self, pending: Pending, error: Exception) -> None:
        pending.future.answer(functools.partial(raise_error, error), self.threads.run)

    def lose(self, peer: int, reason: str) -> None:
        """Give a peer up: calls to it fail now and later."""
        worker = self.directory.workers[peer]
        self._lost.setdefault(peer, f"{worker} is lost: {reason}")
        for pending in self.calls.close_all(peer):
            self._fail_call(pending, errors.WorkerLostError(f"{pending}: {self._lost[peer]}", worker=worker))

    def leave(self, why: str) -> None:
        """Tell everybody else that this worker goes."""
        for peer in range(self.size):
            if peer != self.rank and peer not in self._lost:
                try:
                    self.post(peer, Message(Kind.LEAVE, self.rank, 0, why))
                except errors.WorkerLostError:
                    log.debug("%s: rank %d has gone before", self.info, peer)

    @property
    def lost(self) -> dict[int, str]:
        return self._lost

    def fail(self, error: BaseException) -> None:
        """The world is broken: everything that waits in it ends with this error."""
        self.failure = self.failure or error
        for pending in self.calls.close_all():
            self._fail_call(pending, error)

    def close(self, *, graceful: bool) -> None:
        """Stop. Calls still in flight fail, references become stale."""
        self.closed = True
        for pending in self.calls.close_all():
            self._fail_call(pending, errors.WorldClosedError(f"{pending}: the world was shut down meanwhile"))
        self.transport.close(graceful=graceful and self.failure is None)
        self.threads.close()
        self.owned.clear()


def raise_error(error: BaseException) -> NoReturn:
    raise error


def checked_timeout(seconds: Any) -> float:
    """A timeout somebody gave, if it is one."""
    if isinstance(seconds, int | float) and seconds > 0 and not math.isnan(seconds):
        return float(seconds)
    raise ValueError(f"timeout must be a positive number of seconds (math.inf: no limit), not {seconds!r}")
