"""The transport over MPI: one duplicated communicator, and no blocking MPI call, since Ctrl-C cannot end one.

Callers send on their own threads (``MPI_THREAD_MULTIPLE``); ``mpi_progress`` decides which thread looks for messages.
In a job that survives, that thread also looks for dead ranks. Nothing is sent to them from then on; half-finished
transfers are dropped, but their memory is kept, since MPI may still use it.
"""

import collections
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
from jdistgrad.wire.doorbell import SERVES, WAITS, Doorbell
from jdistgrad.wire.memory import BufferPool, SharedMemory
from jdistgrad.wire.message import ENCODED, Message, MessageType, Parcel
from jdistgrad.wire.mpi_failures import Failures, failed, is_failure
from jdistgrad.wire.mpi_progress import Progress
from jdistgrad.wire.polling import SHORTEST, pause
from jdistgrad.wire.transport import Receiver, Task, Transport

FRAME_TAG = 0
CHUNK = 1 << 30  # bytes: more than this overflows the int that MPI counts with
AT_ONCE = 8  # messages in one look
FLUSH_SECONDS = 5.0
CHECK_SECONDS = 0.02  # how often to look for dead ranks where MPI raises no error of its own

log = logging.getLogger("jdistgrad.wire")

# Closed transports with transfers under way: MPI still uses their memory.
_abandoned: list["MPITransport"] = []


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """Active MPI requests and the memory they use. ``frame`` is set if they receive a frame's large pieces."""

    requests: list[MPI.Request]
    memory: Any
    peer: int
    frame: frames.Frame | None = None


class MPITransport(Transport):
    """A transport between the ranks of a communicator, which no other code may use.

    Arguments:
      memory: shared with the other ranks of this machine, which it has met. Closed with the transport.
      doorbell: wakes this rank, and the others, which it has met. Closed with the transport.
      failures: finds the ranks that die, if the others go on without them.
    """

    hands_over = False

    def __init__(self, comm: MPI.Intracomm, memory: SharedMemory, doorbell: Doorbell, failures: Failures | None = None):
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._failures, self._next_check, self._doorbell = comm, failures, 0.0, doorbell
        self._memory, self._lost = memory, set[int]()
        self._dropped: list[Transfer] = []
        self._pool, self._status = BufferPool(), MPI.Status()
        self._tags = int(comm.Get_attr(MPI.TAG_UB) or 32767)  # of the large pieces that follow frames
        self._numbers = [itertools.count() for _ in range(comm.size)]
        self._outgoing: collections.deque[Transfer] = collections.deque()
        self._begun = self._begun_before_look = 0  # transfers that did not end at once
        self._incoming: list[Transfer] = []
        self._closed = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        progress = self._progress = Progress(
            f"jdistgrad-mpi-{self.rank}",
            self._look,
            receiver,
            self._doorbell,
            came=self._something_came,
            rings=lambda: self._doorbell.all_ring and not self._outgoing,
        )
        self.wait, self.look = progress.wait, progress.look  # type: ignore[method-assign]
        self.wake = functools.partial(self._doorbell.ring_own, WAITS)  # type: ignore[method-assign]
        progress.start()

    def serve_only(self, *, only: bool) -> None:
        self._progress.idle_process = only

    def _something_came(self) -> bool:
        """Return whether there is something to do that the last look did not find."""
        try:
            # Open MPI 5 fetches what has come after it has probed: only the next probe finds that.
            probe = self._comm.Iprobe
            came = probe(MPI.ANY_SOURCE, FRAME_TAG) or probe(MPI.ANY_SOURCE, FRAME_TAG)
            return came or self._begun != self._begun_before_look
        except MPI.Exception:  # of a death: the next look handles it
            return True

    # Sending, on the caller's thread.

    def send(self, peer: int, message: Message) -> None:
        if peer == self.rank:
            task = self._receiver.receive(message)
            if task is not None:
                self._receiver.run(task)
            self._doorbell.ring_own(WAITS)
            return
        parcel = message.body
        if message.kind not in ENCODED and parcel is not None:
            parcel = Parcel(pickle.dumps(parcel, protocol=5), [])
        number = next(self._numbers[peer])
        frame, bulk = frames.pack(message, parcel, number, functools.partial(self._memory.put, peer))
        self._start(peer, frame, bulk, 1 + number % self._tags)

    def send_words(self, peers: Sequence[int], identifier: int, scope: int, word: bytes) -> None:
        frame = frames.WORD.pack(MessageType.WORD, identifier, scope) + word
        for peer in peers:
            try:
                self._start(peer, frame, bells=WAITS)  # a rank that comes later to the meeting looks then
            except errors.WorkerLostError:
                continue

    def _start(
        self, peer: int, frame: bytes, bulk: Sequence[memoryview] = (), tag: int = 0, bells: int = WAITS | SERVES
    ) -> None:
        if self._closed:
            raise errors.WorldClosedError(f"the message to rank {peer} was not sent: this world has been shut down")
        if peer in self._lost:
            raise self._is_lost(peer)
        requests: list[MPI.Request] = []
        try:
            requests.append(self._comm.Isend([frame, MPI.BYTE], peer, FRAME_TAG))
            for piece in bulk:
                requests += [self._comm.Isend([part, MPI.BYTE], peer, tag) for part in _chunks(piece)]
            if not MPI.Request.Testall(requests):
                self._outgoing.append(Transfer(requests, (frame, bulk), peer))
                self._begun += 1
                self._doorbell.ring_own(WAITS | SERVES)  # the looking thread must complete it
            self._doorbell.ring(peer, bells)
        except MPI.Exception as error:
            self._dropped.append(Transfer(requests, (frame, bulk), peer))
            if self._failures is None or not is_failure(error):
                raise errors.WireError(f"the message to rank {peer} could not be sent: {error}") from error
            raise self._is_lost(peer) from error

    def _is_lost(self, peer: int) -> errors.WorkerLostError:
        return errors.WorkerLostError(f"the worker of rank {peer} is lost: it was killed or ended", worker=peer)

    # Ranks that have died. Any thread may call ``lose`` and ``kill``; the rest is for the looking thread.

    def lose(self, peer: int) -> None:
        self._lost.add(peer)
        self._doorbell.lose(peer)
        self._memory.lose(peer)

    def kill(self, peer: int) -> bool:
        return self._failures is not None and self._failures.kill(peer)

    def _after_failure(self, error: MPI.Exception) -> None:
        """Drop the dead ranks, if this error comes from their death. Raises otherwise."""
        if not is_failure(error):
            raise error
        if self._failures is not None:
            self._find_lost(self._failures)
            if self._lost:
                return
            raise error
        for dead in failed(self._comm):  # where mpirun does not end the job at a death: `mpirun --with-ft ulfm`
            why = f"{self._is_lost(dead)}. Use init(survive=True) for a world that goes on without it"
            raise errors.WorkerLostError(why, worker=dead) from error
        raise error

    def _find_lost(self, failures: Failures) -> None:
        for rank in failures.find():
            self.lose(rank)
            self._receiver.lost(rank, "it was killed or ended")
        for transfers in (self._outgoing, self._incoming) if self._lost else ():
            for transfer in [one for one in transfers.copy() if one.peer in self._lost]:
                transfers.remove(transfer)
                self._dropped.append(transfer)

    # Receiving, on whichever thread looks for messages.

    def _look(self) -> tuple[bool, Task | None]:
        """Receive messages until one brings a task or none is left; return whether anything moved, and the task."""
        if self._failures is not None and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + CHECK_SECONDS
            self._find_lost(self._failures)
        try:
            self._begun_before_look, moved = self._begun, False
            if self._outgoing or self._incoming:
                moved, task = self._advance()
                if task is not None:
                    return True, task
            for _ in range(AT_ONCE):
                arrived, task = self._take_frame()
                moved = moved or arrived
                if task is not None or not arrived:
                    return moved, task
            return moved, None
        except MPI.Exception as error:
            self._after_failure(error)
            return False, None

    def _advance(self) -> tuple[bool, Task | None]:
        """Complete the sends, and at most one transfer that arrives; return as ``_look`` does."""
        moved = bool(self._incoming)  # which must be advanced without naps
        for transfer in self._outgoing.copy():  # sending threads append meanwhile
            if MPI.Request.Testall(transfer.requests):
                self._outgoing.remove(transfer)
                moved = True
        for transfer in self._incoming:
            if MPI.Request.Testall(transfer.requests):
                self._incoming.remove(transfer)
                if transfer.frame is None:
                    return True, self._frame_complete(transfer.peer, transfer.memory)
                return True, self._receive(transfer.frame.complete())
        return moved, None

    def _take_frame(self) -> tuple[bool, Task | None]:
        status = self._status
        matched = self._comm.Improbe(MPI.ANY_SOURCE, FRAME_TAG, status)
        if matched is None:
            return False, None
        data = bytearray(status.Get_count(MPI.BYTE))
        source, request = status.source, matched.Irecv([data, MPI.BYTE])
        if request.Test():
            return True, self._frame_complete(source, data)
        self._incoming.append(Transfer([request], data, source))
        self._doorbell.ring(source)  # MPI may need the sender's help
        return True, None

    def _frame_complete(self, source: int, data: bytearray) -> Task | None:
        """Deliver a frame's message, or start to receive its large pieces."""
        if data[0] == MessageType.WORD:
            _, identifier, scope = frames.WORD.unpack_from(data)
            self._receiver.word(source, identifier, scope, bytes(data[frames.WORD.size :]))
            return None
        frame = frames.unpack(data, source)
        if not frame.places:
            return self._receive(frame.complete())
        bulk = []
        for k, place in frame.places.items():
            if place:
                frame.pieces[k] = self._memory.found(source, place, frame.lengths[k])
                if frame.pieces[k] is None:
                    return None
            else:
                frame.pieces[k] = self._pool.lease(frame.lengths[k])
                bulk += _chunks(frame.pieces[k])
        if not bulk:
            return self._receive(frame.complete())
        arriving, tag = Transfer([], frame.pieces, source, frame), 1 + frame.number % self._tags
        try:
            for part in bulk:
                arriving.requests.append(self._comm.Irecv([part, MPI.BYTE], source, tag))
        except MPI.Exception:
            self._dropped.append(arriving)  # MPI may still write to its memory
            raise
        self._incoming.append(arriving)
        self._doorbell.ring(source)
        return None

    def _receive(self, message: Message) -> Task | None:
        if message.kind not in ENCODED and message.body is not None:
            message.body = pickle.loads(message.body.stream)
        try:
            task: Task | None = self._receiver.receive(message)
            return task
        except Exception:  # one invalid message must not keep the others from being delivered
            log.exception("rank %d could not handle a %s from rank %d", self.rank, message.kind.name, message.source)
            return None

    # The end.

    def close(self, *, graceful: bool) -> None:
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._outgoing and time.monotonic() < deadline:
            pause(SHORTEST)
        self._closed = True
        self._progress.stop()
        self._doorbell.close()
        self._memory.close()
        if self._failures is not None:
            self._failures.close()
        if self._failures is not None or self._incoming or self._outgoing or self._dropped:
            _abandoned.append(self)  # the communicator is not freed either: all ranks would have to, in one order


def _chunks(piece: memoryview) -> list[memoryview]:
    """Return the parts in which MPI, which counts bytes in C ints, sends a piece of any length."""
    view = memoryview(piece)
    return [view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK)]
