"""Messages that come late, and so in another order: for tests of the layers above.

Over MPI a worker's communicator does this to frames, in a local world the transport to messages.
"""

import itertools
import logging
import queue
import random
import threading
import time

from jdistgrad.rpc.worker import current_worker
from jdistgrad.threads import started
from jdistgrad.wire import frames, launcher_env
from jdistgrad.wire.local import LocalTransport
from jdistgrad.wire.message import MessageType
from jdistgrad.wire.polling import poll

LATE_SECONDS = 0.003
FRAME_TAG = 0
TO_FLUSH = 20.0
SHARE = 0.4  # of the messages

log = logging.getLogger(__name__)


class Lateness:
    """The choice of the messages of one worker that come late.

    Attributes:
      late: the kinds of messages that were late.
    """

    def __init__(self, chance):
        self.chance, self.late = chance, set()

    def of(self, kind):
        """Return whether a message that is being sent is late."""
        if self.chance.random() >= SHARE:
            return False
        self.late.add(kind)
        return True

    def send_late(self, send):
        _later.put((time.monotonic() + self.chance.random() * LATE_SECONDS, next(_order), send))


class Communicator:
    """A communicator some of whose frames are late."""

    def __init__(self, comm, lateness):
        self._comm, self._lateness = comm, lateness
        self._begun, self._beginning = [], threading.RLock()  # sends of copies: MPI uses their memory

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, message, peer, tag):  # noqa: N802
        from mpi4py import MPI

        if tag != FRAME_TAG or not self._lateness.of(frames.KINDS[message[0][0]]):
            return self._comm.Isend(message, peer, tag)
        copy = bytes(message[0])
        self._lateness.send_late(lambda: self._send_copy(copy, peer))
        return MPI.REQUEST_NULL

    def _send_copy(self, copy, peer):
        with self._beginning:  # any thread sends, and so does the one for late messages
            self._flushed()
            self._begun.append((self._comm.Isend(copy, peer, FRAME_TAG), copy))

    def _flushed(self):
        with self._beginning:
            self._begun = [(request, copy) for request, copy in self._begun if not over(request)]
            return not self._begun

    def Free(self):  # noqa: N802
        _later.join()
        poll(self._flushed, TO_FLUSH)
        self._comm.Free()


def over(request):
    """Return whether a send has ended, or will not: its receiver may have died."""
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception:
        return True


def sender(transport, lateness):
    """Return a ``send`` for a transport of a local world, some of whose messages to other workers are late."""
    genuine = transport.send

    def send(peer, message):
        told_at_once = peer == transport.rank or message.kind is MessageType.LEAVE  # others see at once who has left
        if not told_at_once and lateness.of(message.kind):
            lateness.send_late(lambda: genuine(peer, message))
        else:
            genuine(peer, message)

    return send


def make_unruly(chance, transport=None):
    """Let some of the messages that a worker sends to others be late; return their choice.

    Arguments:
      transport: by default that of this worker.
    """
    transport, lateness = transport or current_worker().transport, Lateness(chance)
    if transport.hands_over:
        transport.send = sender(transport, lateness)
    else:
        transport._comm = Communicator(transport._comm, lateness)
    return lateness


def make_all_unruly(seed):
    """Let every world that is opened from now on deliver some messages late."""
    if launcher_env.launched():
        from jdistgrad.wire.mpi_transport import MPITransport

        _make_unruly_from_the_start(MPITransport, seed)
    _make_unruly_from_the_start(LocalTransport, seed)


def _make_unruly_from_the_start(kind, seed):
    start = kind.start

    def start_unruly(transport, receiver):
        make_unruly(random.Random(seed + transport.rank), transport)
        start(transport, receiver)

    kind.start = start_unruly


def _send_later():
    while True:
        due, _, send = _later.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            send()
        except Exception as error:  # the receiver has left, or its world has ended
            log.debug("a late message was not sent: %s", error)
        del send
        _later.task_done()


_later, _order = queue.PriorityQueue(), itertools.count()
started(_send_later, "late-messages")
