"""The mailbox of a worker, through which all its parts send and receive, and find each other by class."""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax

from jdistgrad import errors
from jdistgrad.ffi import sites
from jdistgrad.rpc import current, devices, trees
from jdistgrad.rpc.directory import Directory
from jdistgrad.rpc.layouts import Layouts
from jdistgrad.rpc.work_count import WorkCount
from jdistgrad.threads import ThreadPool
from jdistgrad.wire.arrays import may_be_written
from jdistgrad.wire.ids import IdSource
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import CALLS, ENCODED, Codec, Kind, Message, Parcel
from jdistgrad.wire.transport import Task, Transport

log = logging.getLogger("jdistgrad.rpc")

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Process:
    """Actions on the process that a worker lives in. They do nothing if the workers are threads of one process.

    Arguments:
      end_job: ends all ranks, for the given cause.
      report: prints the exception because of which this worker leaves.
    """

    end_job: Callable[[str], None]
    report: Callable[[BaseException], None]


@dataclasses.dataclass(eq=False, repr=False)
class Mailbox:
    """A worker's address in its world, and its access to the transport.

    Attributes:
      work: counts of the messages that carry work.
      survives: whether the others go on when a worker is lost.
      home: the thread that opened the world.
      failure: the error that broke the world, if any.
      hands_over: whether messages are handed over as objects: in a local world, also one of a single worker.
      refused: how many messages were refused or came too late, by the rank that sent them.
      note_gifts: takes note of the weight of references in a message to a worker, in a world that survives.
    """

    world: str
    rank: int
    directory: Directory
    transport: Transport
    codec: Codec
    _: dataclasses.KW_ONLY
    timeout: float
    process: Process
    device: jax.Device | None = None
    survives: bool = False

    def __post_init__(self) -> None:
        self.info, self.size = self.directory.workers[self.rank], len(self.directory.workers)
        self.hands_over = self.transport.hands_over
        self.ids, self.work, self.slots = IdSource(self.rank), WorkCount(self.rank, self.size), current.Slots()
        self.home = threading.get_ident()
        self.failure: BaseException | None = None
        self.closed = False
        self.refused: collections.Counter[int] = collections.Counter()
        self.note_gifts: Callable[[int, Parcel], None] | None = None
        self._counting = threading.Lock()
        self._layouts = Layouts(self.codec)
        self._threads = ThreadPool(f"jdistgrad-{self.info.name}", self.enter_thread)
        self._parts: dict[type, Any] = {}

    def add(self, part: P) -> P:
        """Register a part under its class, and return it."""
        self._parts[type(part)] = part
        return part

    def part(self, kind: type[P]) -> P:
        found: P = self._parts[kind]
        return found

    @property
    def shares_process(self) -> bool:
        return self.hands_over and self.size > 1

    def post(self, peer: int, message: Message, *, snapshot: bool = True) -> int:
        """Send a message, and count it if it carries work; return its bytes, 0 if nothing is encoded.

        ``snapshot``: the caller may change NumPy arrays, lists and dicts as soon as this returns. Without a snapshot
        these must not change until the message has been sent, and large arrays are not copied.
        """
        with put_off_interrupt():
            self.work.sending(message.kind, peer)
            parcel: Parcel | None = None
            try:
                if message.kind in ENCODED and self._wants_encoding(peer, message.body):
                    parcel = self._encoded(message, snapshot=snapshot)
                    message = Message(message.kind, message.source, message.id, parcel)
                    if parcel.attached and self.note_gifts is not None:
                        self.note_gifts(peer, parcel)
                elif isinstance(message.body, Parcel) and peer == self.rank:
                    message = Message(message.kind, message.source, message.id, _for_itself(message.body))
                elif snapshot and message.kind in CALLS and not isinstance(message.body, Parcel):
                    message = Message(message.kind, message.source, message.id, _steady(message.body))
                size = message.body.bytes if isinstance(message.body, Parcel) else 0
                self.transport.send(peer, message)
            except BaseException:
                if parcel is not None and parcel.undo is not None:
                    parcel.undo()
                self.work.not_sent(message.kind, peer)
                raise
        return size

    def _encoded(self, message: Message, *, snapshot: bool) -> Parcel:
        if message.kind is Kind.PUSH:
            return self._layouts.encode(*message.body)
        return self.codec.encode(message.body, snapshot=snapshot)

    def _wants_encoding(self, peer: int, body: Any) -> bool:
        return not (body is None or self.hands_over or peer == self.rank or isinstance(body, Parcel))

    def for_several(self, body: Any) -> Any:
        """Encode a body that will be posted to several workers; return it as it is if each needs its own parcel."""
        if self.hands_over:
            return body
        parcel = self.codec.encode(body, snapshot=True)
        if parcel.attached and parcel.undo is not None:  # it gives weight of references away, to one worker only
            parcel.undo()
            return body
        return parcel

    def open(self, message: Message) -> Any:
        """Return a message's body, decoded if it came over a wire. Raises the WireError of a damaged message."""
        body = message.body
        if isinstance(body, errors.WireError):
            raise body
        if not isinstance(body, Parcel):
            return body
        try:
            return (self._layouts if message.kind is Kind.PUSH else self.codec).decode(body)
        except errors.FunctionError as error:
            self.refuse(message.source, f"a {message.kind.name}", error)
            raise

    def refuse(self, source: int, what: str, why: object, level: int = logging.ERROR) -> None:
        """Count and log a message that is not applied."""
        with self._counting:
            self.refused[source] += 1
        log.log(level, "%s refuses %s from rank %d: %s", self.info, what, source, why)

    def wait_for(self, futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None) -> None:
        """Return when one of the futures, which messages complete, is done or the timeout has passed."""
        self.transport.wait_for(futures, timeout)

    def run(self, task: Task) -> None:
        """Run a task on another thread of this worker."""
        self._threads.run(task)

    def resume_tasks(self) -> None:
        """Run tasks for which there was no thread, if there is one now."""
        self._threads.resume()

    def enter_thread(self) -> None:
        """Let this thread belong to this worker."""
        current.bind_thread(self)

    def wait_for_arguments(self, tree: Any) -> None:
        """Wait until the arrays in a served function's arguments are ready.

        A program whose arguments are not ready runs later, on one of XLA's few threads, and keeps that thread while it
        waits for other workers. Otherwise it runs on the thread that calls it, and there are always enough of these.
        """
        if sites.any_sites():
            _wait_for_arrays(trees.leaves(tree))

    def finish_programs(self, result: Any) -> None:
        """Wait until the programs that a served function has called have run, and the arrays in its result are ready.

        If workers have devices of their own, or arguments are not ready, programs may be under way when the function
        returns. They may need the function's context. Moreover, XLA runs the programs of one thread one after the
        other, and the next call that this thread serves may be a call that they wait for. A program on several devices
        runs when others have ended, on other threads: the caller's timeout counts until then.
        """
        if self.device is not None or sites.any_sites():
            devices.finish_programs_of_this_thread()
            _wait_for_arrays(trees.leaves_once(result))

    def close_transport(self, *, graceful: bool) -> None:
        self.transport.close(graceful=graceful and self.failure is None)

    def close_threads(self) -> None:
        self._threads.close()


def _wait_for_arrays(leaves: Iterable[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            leaf.block_until_ready()


def _for_itself(parcel: Parcel) -> Parcel:
    """Return a parcel for the worker that has made it, and that sends it to others too, with arrays of its own."""
    return Parcel(parcel.stream, [_own(buffer) for buffer in parcel.buffers], parcel.attached)


def _own(buffer: memoryview) -> memoryview:
    changes = not buffer.readonly or may_be_written(buffer)
    return memoryview(bytearray(buffer)) if changes else buffer


def _steady(call: Any) -> Any:
    """Return a call that is handed over with copies of the arguments that the caller may change.

    These are NumPy arrays, lists and dicts. Without them its arguments are the caller's own objects.
    """
    function, args, kwargs, *scope = call
    args, kwargs = trees.steady((args, kwargs)) if kwargs else (trees.steady(args), kwargs)
    return function, args, kwargs, *scope


# Every resident is a mailbox: the functions of ``current``, with the return type that the layers above need.
current_mailbox = cast("Callable[[], Mailbox]", current.current_resident)
find_mailbox = cast("Callable[[], Mailbox | None]", current.find_resident)


def current_part(kind: type[P]) -> P:
    """Return a part of the worker that this code runs on, by its class."""
    return current_mailbox().part(kind)
