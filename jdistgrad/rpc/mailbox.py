"""The mailbox of a worker, through which all its parts send and receive, and find each other by class."""

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from jdistgrad import errors
from jdistgrad.ffi import sites
from jdistgrad.leaves import may_be_written
from jdistgrad.rpc import current, trees
from jdistgrad.rpc.directory import Directory, WorkerInfo
from jdistgrad.rpc.functions import describe
from jdistgrad.threads import ThreadPool
from jdistgrad.wire.arrays import identity
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import CALLS, ENCODED, WORK, Message, MessageType, Parcel, ids_of
from jdistgrad.wire.transport import Task, Transport

log = logging.getLogger("jdistgrad.rpc")

P = TypeVar("P")


class WorkerPart:
    """A part of a worker that others are waited for in, or that lost workers concern.

    Attributes:
      busy: whether the part has something under way for which the world must stay open.
    """

    busy: Any = False

    def awaited(self) -> set[int]:
        """Return the ranks of the workers whose silence would keep this part waiting."""
        return set()

    def tick(self, now: float) -> None:
        """Do housekeeping, without waiting."""

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        """Do without a worker that is lost from now on. It may be called several times, by any thread."""


CALL, CALLBACKS, ON_LOST = "{}", "the callbacks of {}", "{} (on_lost)"  # what runs of a function, for messages


class WorkCount:
    """The numbers of messages with work sent to each worker, received from each, and being served. For any thread.

    By these a world decides when it may close. They are counted by worker, so that those of lost workers can be left
    out.

    Attributes:
      serving: how many calls of each worker have arrived and not been answered; of this one, also what it does itself.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._lock, self._rank = threading.Lock(), rank
        self._sent, self._received, self.serving = [0] * size, [0] * size, [0] * size

    def sending(self, peer: int, count: int = 1) -> None:
        with self._lock:
            self._sent[peer] += count

    def received(self, peer: int) -> None:
        with self._lock:
            self._received[peer] += 1

    def begin(self, peer: int) -> None:
        with self._lock:
            self._received[peer] += 1
            self.serving[peer] += 1

    def served(self, peer: int) -> None:
        with self._lock:
            self.serving[peer] -= 1

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        self._started()
        try:
            yield
        finally:
            self.served(self._rank)

    def counted(self, task: Callable[[], Any]) -> Callable[[], None]:
        """Return a task, for any thread, that keeps this worker busy from now until it has run."""

        def run() -> None:
            try:
                task()
            finally:
                self.served(self._rank)

        self._started()
        return run

    def _started(self) -> None:
        with self._lock:
            self.serving[self._rank] += 1

    def counts(self, lost: Collection[int] = ()) -> tuple[int, int, int]:
        """Return the numbers sent to and received from workers that are not lost, and being served, at one moment."""
        with self._lock:
            sent, received = (
                sum(n for rank, n in enumerate(of) if rank not in lost) for of in (self._sent, self._received)
            )
            return sent, received, sum(self.serving)


class Running:
    """Users' code that a worker runs for another one: a call, callbacks of a call, or one of ``on_lost``.

    Attributes:
      peer: the rank of the worker that has called, has answered, or is lost.
      function: the function of the call, or the callback of ``on_lost``; None if the call could not be read.
      what: ``CALL``, ``CALLBACKS`` or ``ON_LOST``.
      thread: the thread that runs it; 0 once the function has returned a future.
    """

    def __init__(self, peer: int, function: Any = None, what: str = CALL):
        self.peer, self.function, self.what = peer, function, what
        self.since, self.thread = time.monotonic(), threading.get_ident()

    def __str__(self) -> str:
        return "a call that could not be read" if self.function is None else self.what.format(describe(self.function))


@dataclasses.dataclass(eq=False, repr=False)
class Mailbox:
    """A worker's address in its world, and its access to the transport.

    Attributes:
      end_job: ends all ranks, for the given cause.
      report: prints the exception because of which this worker leaves.
      work: counts of the messages that carry work.
      survives: whether the others go on when a worker is lost.
      home: the thread that opened the world.
      failure: the error that broke the world, if any.
      hands_over: whether messages are handed over as objects: in a local world, also one of a single worker.
      threads: the threads that serve calls.
      running: users' code that runs here for other workers, by number, the oldest first.
      refused: how many messages were refused or came too late, by the rank that sent them.
    """

    world: str
    rank: int
    directory: Directory
    transport: Transport
    codec: Any  # a ``PickleCodec``, of a layer above
    _: dataclasses.KW_ONLY
    timeout: float
    end_job: Callable[[str], None] = lambda cause: None  # other threads of the process may be workers too
    report: Callable[[BaseException], None] = lambda error: None
    device: jax.Device | None = None
    survives: bool = False

    def __post_init__(self) -> None:
        self.info, self.size = self.directory.workers[self.rank], len(self.directory.workers)
        self.hands_over = self.transport.hands_over
        self.shares_process = self.hands_over and self.size > 1
        self.ids, self.work, self.slots = ids_of(self.rank), WorkCount(self.rank, self.size), current.Slots()
        self.home = threading.get_ident()
        self.failure: BaseException | None = None
        self.closed = False
        self.refused: collections.Counter[int] = collections.Counter()
        self.threads = ThreadPool(f"jdistgrad-{self.info.name}", self.enter_thread)
        self.running: dict[int, Running] = {}
        self._parts: dict[type, Any] = {}

    def add(self, part: P) -> P:
        self._parts[type(part)] = part
        return part

    @property
    def parts(self) -> list[WorkerPart]:
        return [one for one in list(self._parts.values()) if isinstance(one, WorkerPart)]

    def part(self, kind: type[P]) -> P:
        found: P = self._parts[kind]
        return found

    def post(self, peer: int, message: Message, *, snapshot: bool = True) -> Parcel | None:
        """Send a message, and count it if it carries work; return its parcel, None if nothing is encoded.

        On the main thread this is to be called in a block of ``put_off_interrupt``: a message that is half sent would
        be counted and never come.

        ``snapshot``: the caller may change NumPy arrays, lists and dicts as soon as this returns. Without a snapshot
        these must not change until the message has been sent, and large arrays are not copied.
        """
        kind, work, parcel = message.kind, message.kind in WORK, None
        if work:
            self.work.sending(peer)
        try:
            if message.body is not None and kind in ENCODED:
                parcel = self._encode(peer, message, snapshot=snapshot)
            self.transport.send(peer, message)
        except BaseException:
            if parcel is not None and parcel.undo is not None:
                parcel.undo()
            if work:
                self.work.sending(peer, -1)
            raise
        return parcel

    def tell(self, peer: int, message: Message) -> errors.WireError | None:
        """Send a message to a worker that may have gone. An error of the wire is logged, and returned."""
        try:
            with put_off_interrupt():
                self.post(peer, message)
        except (errors.WorkerLostError, errors.WorldClosedError):
            log.debug("%s: rank %d had gone before %s was sent", self.info, peer, message.kind.name)
        except errors.WireError as error:
            log.error("%s: rank %d was not sent %s: %s", self.info, peer, message.kind.name, error)
            return error
        return None

    def _encode(self, peer: int, message: Message, *, snapshot: bool) -> Parcel | None:
        """Put a message's body into the form in which it travels; return the parcel if it is encoded for the peer."""
        body = message.body
        if isinstance(body, Parcel):  # for several workers
            if peer == self.rank:  # it gets arrays of its own
                own = [
                    one if one.readonly and not may_be_written(one) else memoryview(bytearray(one))
                    for one in body.buffers
                ]
                message.body = Parcel(body.stream, own, body.attached)
            return dataclasses.replace(body, undo=None)
        if self.hands_over or peer == self.rank:
            if snapshot and message.kind in CALLS:
                function, args, kwargs = body  # the caller may change NumPy arrays, lists and dicts among them
                message.body = function, *(trees.steady((args, kwargs)) if kwargs else (trees.steady(args), kwargs))
            return None
        parcel: Parcel
        if message.kind is MessageType.PUSH:
            parcel = self.codec.encode_pushed(*body)
        else:
            if message.kind in CALLS and not body[2]:  # no keyword arguments
                body = body[:2]
            parcel = self.codec.encode(body, snapshot=snapshot)
        message.body = parcel
        return parcel

    def for_several(self, body: Any) -> Any:
        """Encode a body that will be posted to several workers; return it as it is if each needs its own parcel."""
        if self.hands_over:
            return body
        parcel = self.codec.encode(body if body[2] else body[:2], snapshot=True)
        if parcel.attached and parcel.undo is not None:  # it gives weight of references away, to one worker only
            parcel.undo()
            return body
        return parcel

    def open(self, message: Message) -> Any:
        """Return a message's body, decoded if it came over a wire."""
        body = message.body
        if not isinstance(body, Parcel):
            return body
        return self.codec.decode_pushed(body) if message.kind is MessageType.PUSH else self.codec.decode(body)

    def refuse(self, source: int, what: str, why: object) -> None:
        self.refused[source] += 1
        log.debug("%s refuses %s from rank %d: %s", self.info, what, source, why)

    def run(self, task: Task) -> None:
        self.threads.run(task)

    def run_counted(self, task: Callable[[], Any]) -> None:
        """Run a task on another thread of this worker, which is busy until the task has run."""
        self.run(self.work.counted(task))

    def run_callbacks(self, what: str, function: Any, peer: int, run: Callable[[], Any]) -> None:
        """Run callbacks on another thread, as work: they may call other workers, so the world stays open for them.

        When they have run, nothing here refers to the answer that they have seen: it may hold references.
        """
        todo = [run]

        def run_here() -> None:
            one, run = Running(peer, function, what), todo.pop()
            self.running[id(one)] = one
            try:
                run()
            finally:
                del self.running[id(one)], run

        self.run_counted(run_here)

    def running_here(self) -> list[Running]:
        return [one for one in list(self.running.values()) if one.thread == threading.get_ident()]

    def enter_thread(self) -> None:
        current.bind_thread(self)

    def wait_for_arguments(self, tree: Any) -> None:
        """Wait until the arrays in a served function's arguments are ready.

        A program whose arguments are not ready runs later, on one of XLA's few threads, and keeps that thread while it
        waits for other workers. Otherwise it runs on the thread that calls it, and there are always enough of these.
        """
        if sites.registered:
            _wait_for_arrays(trees.leaves(tree))

    def finish_programs(self, result: Any) -> None:
        """Wait until the programs that a served function has called have run, and the arrays in its result are ready.

        If workers have devices of their own, or arguments are not ready, programs may be under way when the function
        returns. They may need the function's context. Moreover, XLA runs the programs of one thread one after the
        other, and the next call that this thread serves may be a call that they wait for. A program on several devices
        runs when others have ended, on other threads: the caller's timeout counts until then.
        """
        if self.device is not None or sites.registered:
            identity(np.float32(0)).block_until_ready()  # after the other programs of this thread
            _wait_for_arrays(trees.leaves_once(result))


def _wait_for_arrays(leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            leaf.block_until_ready()


# The functions of ``current``, with the return type that the layers above need.
current_mailbox: Callable[[], Mailbox] = current.current_resident
find_mailbox: Callable[[], Mailbox | None] = current.find_resident


def current_part(kind: type[P]) -> P:
    found: P = current_mailbox()._parts[kind]
    return found
