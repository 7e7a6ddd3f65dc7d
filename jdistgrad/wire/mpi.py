"""The transport over MPI: one duplicated communicator, and no blocking MPI call anywhere.

Callers send on their own threads (``MPI_THREAD_MULTIPLE``); ``mpi_progress`` decides which thread looks for messages.
Nothing waits inside MPI, because Ctrl-C has no effect there.

In a job that survives, the thread that looks for messages also looks for ranks that have died. Nothing is sent to them
from then on; what was half sent or half received is dropped, but its memory is kept, since MPI may still use it.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import pickle
import time
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from jdistgrad import errors
from jdistgrad.wire import frames
from jdistgrad.wire.doorbell import Doorbell
from jdistgrad.wire.memory import BufferPool, SharedMemory
from jdistgrad.wire.message import ENCODED, Message, Parcel
from jdistgrad.wire.mpi_failures import Failures, failed, is_failure
from jdistgrad.wire.mpi_process import chunks
from jdistgrad.wire.mpi_progress import Progress
from jdistgrad.wire.polling import pause
from jdistgrad.wire.transport import Receiver, Task, Transport

FRAME_TAG = 0
PROBES = 8
MISSES = 2  # probes in vain, after which nothing has come
FLUSH_SECONDS = 5.0
CHECK_SECONDS = 0.02  # how often to look for dead ranks where MPI raises no error of its own

log = logging.getLogger("jdistgrad.wire")

# Transports that were closed with transfers under way: MPI still uses their memory.
_abandoned: list["MPITransport"] = []

# Communicators of worlds that this process has left, by world. Only all ranks together may free one, or none: Open MPI
# stands still in a later split otherwise. Whether all have left in the same way is known when they meet again.
worlds_left: dict[str, MPI.Intracomm] = {}


def free_left(left: Sequence[Sequence[str]]) -> None:
    """Free the communicators of the worlds that all ranks have left with their transfers done. All must call it.

    Arguments:
      left: by rank, the worlds in its ``worlds_left``.
    """
    for world in left[0]:
        if all(world in of_rank for of_rank in left):
            worlds_left[world].Free()
    worlds_left.clear()


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """MPI requests under way and the memory they use. ``frame`` is set if they receive a frame's large pieces."""

    requests: list[MPI.Request]
    memory: Any
    peer: int
    frame: frames.Frame | None = None

    def done(self) -> bool:
        return MPI.Request.Testall(self.requests)


class MPITransport(Transport):
    """A transport between the ranks of a communicator, which no other code may use.

    Arguments:
      world: the name of the world, the same on all ranks.
      memory: shared with the other ranks of this machine; it knows that of all ranks. It is closed with the transport.
      doorbell: wakes this rank, and the others; it has the addresses of all ranks. It is closed with the transport.
      failures: finds the ranks that die, if the others go on without them.
    """

    hands_over = False

    def __init__(
        self,
        comm: MPI.Intracomm,
        world: str,
        memory: SharedMemory,
        doorbell: Doorbell,
        failures: Failures | None = None,
    ):
        self.rank, self.size, self._world = comm.rank, comm.size, world
        self._comm, self._failures, self._next_check, self._doorbell = comm, failures, 0.0, doorbell
        self._memory, self._lost = memory, set[int]()
        self._dropped: list[Transfer] = []
        self._pool = BufferPool()
        self._tags = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        self._numbers = [itertools.count() for _ in range(comm.size)]
        self._outgoing: collections.deque[Transfer] = collections.deque()
        self._begun = self._begun_before_look = 0  # transfers that did not end at once
        self._incoming: list[Transfer] = []
        self._closed = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._progress = Progress(
            f"jdistgrad-mpi-{self.rank}",
            self._look_for_all,
            receiver,
            sleep=lambda seconds: self._doorbell.sleep(seconds, self._something_came),
            rung=lambda: self._doorbell.all_ring and not self._outgoing,
        )
        self._progress.start()

    def wait_for(self, futures: Sequence[concurrent.futures.Future[Any]], timeout: float | None) -> None:
        self._progress.wait_for(futures, timeout)

    def look(self) -> None:
        self._progress.look()

    def serve_only(self, *, only: bool) -> None:
        self._progress.idle_process = only

    def _something_came(self) -> bool:
        """Return whether there is something to do that the last look did not find."""
        try:
            came = any(self._comm.Iprobe(MPI.ANY_SOURCE, FRAME_TAG) for _ in range(MISSES))
            return came or self._begun != self._begun_before_look
        except MPI.Exception:  # of a death: the next look sees to it
            return True

    # Sending, on the caller's thread.

    def send(self, peer: int, message: Message) -> None:
        if peer == self.rank:
            task = self._receiver.receive(message)
            if task is not None:
                self._receiver.run(task)
            return
        if self._closed:
            raise errors.WorldClosedError(f"the message to rank {peer} was not sent: this world has been shut down")
        if peer in self._lost:
            raise self._is_lost(peer)
        parcel: Parcel | None = message.body
        if message.kind not in ENCODED and message.body is not None:
            parcel = Parcel(memoryview(pickle.dumps(message.body, protocol=5)), [])
        number = next(self._numbers[peer])
        put = functools.partial(self._memory.put, peer)
        frame, bulk = frames.pack(message.kind, message.id, number, parcel, put)
        transfer = Transfer([], (frame, bulk), peer)
        try:
            transfer.requests.append(self._comm.Isend([frame, MPI.BYTE], peer, FRAME_TAG))
            for part in (part for piece in bulk for part in chunks(piece)):
                transfer.requests.append(self._comm.Isend([part, MPI.BYTE], peer, self._tag(number)))
            if not transfer.done():
                self._outgoing.append(transfer)
                self._begun += 1
                self._doorbell.ring(self.rank)  # whoever looks here now must look for its end, too
            self._doorbell.ring(peer)
        except MPI.Exception as error:
            self._dropped.append(transfer)
            if self._failures is None or not is_failure(error):
                raise errors.WireError(f"the message to rank {peer} could not be sent: {error}") from error
            raise self._is_lost(peer) from error
        self._progress.last_activity = time.monotonic()  # messages are to be expected

    def _is_lost(self, peer: int) -> errors.WorkerLostError:
        return errors.WorkerLostError(f"the worker of rank {peer} is lost: it was killed or ended", worker=peer)

    # Ranks that have died. Any thread may call ``lose`` and ``kill``; the rest is for the one that looks for messages.

    def lose(self, peer: int) -> None:
        self._lost.add(peer)
        self._doorbell.lose(peer)
        self._memory.lose(peer)

    def kill(self, peer: int) -> bool:
        """Kill the process of a worker that stands still; return False if it is out of reach."""
        return self._failures is not None and self._failures.kill(peer)

    def _look_for_all(self) -> tuple[bool, Task | None]:
        now = time.monotonic()
        if self._failures is not None and now >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            self._find_lost(self._failures)
        try:
            return self._look()
        except MPI.Exception as error:
            if not is_failure(error):
                raise
            if self._failures is not None:
                self._find_lost(self._failures)
                if self._lost:
                    return False, None
            dead = failed(self._comm)
            if not dead or self._failures is not None:
                raise
            # Where mpirun does not end the job at a death: `mpirun --with-ft ulfm`.
            why = f"{self._is_lost(dead[0])}. This world does not go on without it: that takes init(survive=True)"
            raise errors.WorkerLostError(why, worker=dead[0]) from error

    def _find_lost(self, failures: Failures) -> None:
        for rank in failures.find():
            self.lose(rank)
            self._receiver.lost(rank, "it was killed or ended")
        if self._lost:
            for transfers in (self._outgoing, self._incoming):
                for transfer in [one for one in transfers.copy() if one.peer in self._lost]:
                    transfers.remove(transfer)
                    self._dropped.append(transfer)

    # Receiving, on whichever thread looks for messages.

    def _look(self) -> tuple[bool, Task | None]:
        """Look for messages once, up to the first that brings a task; return whether anything moved, and the task."""
        self._begun_before_look = self._begun
        moved = False
        for transfer in self._outgoing.copy():  # sending threads append meanwhile
            if transfer.done():
                self._outgoing.remove(transfer)
                moved = True
        if self._incoming:
            task = self._advance_incoming()
            if task is not None:
                return True, task
            moved = True  # a transfer under way must be advanced without naps
        misses = 0
        for _ in range(PROBES):
            arrived, task = self._take_frame()
            moved, misses = moved or arrived, misses + (not arrived)
            # Open MPI fetches what has come after it has probed: only the next probe finds it.
            if task is not None or misses == MISSES:
                break
        return moved, task

    def _take_frame(self) -> tuple[bool, Task | None]:
        status = MPI.Status()
        matched = self._comm.Improbe(MPI.ANY_SOURCE, FRAME_TAG, status)
        if matched is None:
            return False, None
        data = bytearray(status.Get_count(MPI.BYTE))
        arriving = Transfer([matched.Irecv([data, MPI.BYTE])], data, status.source)
        if arriving.done():
            return True, self._frame_complete(arriving)
        self._incoming.append(arriving)
        self._doorbell.ring(arriving.peer)  # MPI may need the sender's help
        return True, None

    def _frame_complete(self, arrived: Transfer) -> Task | None:
        """Take a complete frame: deliver its message, or start to receive its large pieces."""
        frame = frames.unpack(arrived.memory)
        bulk = []
        missing = [k for k, piece in enumerate(frame.pieces) if piece is None]
        for k, place in zip(missing, frame.places, strict=True):
            if place:
                frame.pieces[k] = self._memory.found(arrived.peer, place, frame.lengths[k])
                if frame.pieces[k] is None:
                    return None
            else:
                frame.pieces[k] = self._pool.lease(frame.lengths[k])
                bulk.append(frame.pieces[k])
        if not bulk:
            return self._receive(arrived.peer, frame)
        arriving = Transfer([], frame.pieces, arrived.peer, frame)
        try:
            for part in (part for piece in bulk for part in chunks(piece)):
                arriving.requests.append(self._comm.Irecv([part, MPI.BYTE], arrived.peer, self._tag(frame.number)))
        except MPI.Exception:
            self._dropped.append(arriving)  # MPI may still write to what it was given
            raise
        self._incoming.append(arriving)
        self._doorbell.ring(arrived.peer)
        return None

    def _tag(self, number: int) -> int:
        """Return the tag of the large pieces that follow a frame."""
        return 1 + number % self._tags

    def _receive(self, source: int, frame: frames.Frame) -> Task | None:
        message = frame.message(source)
        if message.kind not in ENCODED and message.body is not None:
            message.body = pickle.loads(message.body.stream)
        try:
            return self._receiver.receive(message)
        except Exception:  # one invalid message must not keep the others from being delivered
            text = "the worker of rank %d could make nothing of a %s from rank %d"
            log.exception(text, self.rank, message.kind.name, source)
            return None

    def _advance_incoming(self) -> Task | None:
        """Complete at most one transfer."""
        for transfer in self._incoming:
            if transfer.done():
                self._incoming.remove(transfer)
                if transfer.frame is None:
                    return self._frame_complete(transfer)
                return self._receive(transfer.peer, transfer.frame)
        return None

    # The end.

    def close(self, *, graceful: bool) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._outgoing and time.monotonic() < deadline:
            pause(100e-6)
        self._closed = True
        self._progress.stop()
        self._doorbell.close()
        self._memory.close()
        if self._failures is not None:
            self._failures.close()
            _abandoned.append(self)  # others may die meanwhile, and no rank may wait for them inside MPI
        elif graceful:
            worlds_left[self._world] = self._comm
        elif self._incoming or self._outgoing or self._dropped:
            _abandoned.append(self)
