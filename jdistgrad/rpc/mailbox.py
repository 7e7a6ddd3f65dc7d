"""What one worker sends and receives through: shared by all its parts, which are found here by their class."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax

from jdistgrad import errors
from jdistgrad.ffi import sites
from jdistgrad.rpc import current, devices, trees
from jdistgrad.rpc.directory import Directory
from jdistgrad.rpc.work_count import WorkCount
from jdistgrad.threads import ThreadPool
from jdistgrad.wire.ids import IdSource
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Message, Parcel
from jdistgrad.wire.severed import Severed
from jdistgrad.wire.transport import Codec, Task, Transport

P = TypeVar("P")


@dataclasses.dataclass(frozen=True)
class Process:
    """What a worker can have done by the process it lives in.

    Arguments:
      end_job: ends all ranks, because of something; does nothing where the workers are threads.
      report: prints an exception that this worker leaves with; likewise.
    """

    end_job: Callable[[str], None]
    report: Callable[[BaseException], None]


class Mailbox:
    """One worker's address in its world, and its way out and in.

    Attributes:
      work: counts of the messages that carry work.
      home: the thread that opened the world.
      failure: what broke the world, if anything did.
      hands_over: whether messages are handed over as they are: workers are threads of one process.
      severed: whether this is the copy of a worker in a forked process.
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
        self.transport: Transport = transport
        self._codec, self.hands_over = codec, transport.hands_over
        self.ids, self.work, self.slots = IdSource(rank), WorkCount(), current.Slots()
        self.home = threading.get_ident()
        self.failure: BaseException | None = None
        self.closed = self.severed = False
        self._threads = ThreadPool(f"jdistgrad-{self.info.name}", self.enter_thread)
        self._parts: dict[type, Any] = {}

    def add(self, part: P) -> P:
        """Make a part known to those who ask for its class."""
        self._parts[type(part)] = part
        return part

    def part(self, kind: type[P]) -> P:
        found: P = self._parts[kind]
        return found

    @property
    def shares_process(self) -> bool:
        return self.hands_over and self.size > 1

    def post(self, peer: int, message: Message, *, snapshot: bool = True) -> None:
        """Send a message and keep count."""
        with put_off_interrupt():
            self.work.sending(message.kind)
            try:
                self.transport.send(peer, message, snapshot=snapshot)
            except BaseException:
                self.work.not_sent(message.kind)
                raise

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
        """Run a task on another thread of this worker's."""
        self._threads.run(task)

    def enter_thread(self) -> None:
        """Let this thread belong to this worker."""
        current.bind_thread(self)

    def wait_for_arguments(self, tree: Any) -> None:
        """Return when arrays are there that a served function will be called with.

        A program whose arguments are not there runs when they are, on one of XLA's few threads, and keeps that thread
        while it waits for other workers. Else it runs on the thread that calls it, of which there are always enough.
        """
        if sites.there_are_any():
            for leaf in trees.leaves(tree):
                if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                    leaf.block_until_ready()

    def finish_programs(self) -> None:
        """Return when the programs that a function called have run, as far as it did not wait for them.

        Where workers have devices of their own, or arguments are not there yet, programs may be under way when the
        function returns. They may need its context; and XLA lets those of one thread run one after the other: the next
        call that this thread serves may be one that they wait for.
        """
        if self.device is not None or sites.there_are_any():
            devices.finish_programs_of_this_thread()

    def sever(self, why: str) -> None:
        """In a forked process: whoever still holds something of this worker is told, and its end here is none."""
        self.closed = self.severed = True
        self.transport = Severed(self.transport, why)

    def close_transport(self, *, graceful: bool) -> None:
        self.transport.close(graceful=graceful and self.failure is None)

    def close_threads(self) -> None:
        self._threads.close()


# Every resident is a mailbox: what ``current`` says of threads, in the type of those above.
current_mailbox = cast("Callable[[], Mailbox]", current.current_resident)
find_mailbox = cast("Callable[[], Mailbox | None]", current.find_resident)


def current_part(kind: type[P]) -> P:
    """A part of the worker this code runs on."""
    return current_mailbox().part(kind)
