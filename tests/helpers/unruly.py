"""Messages that get lost, come late or twice, or cannot be sent: by kind and on request, for tests of the layers above.

Over MPI a worker's communicator does this to frames, so that their numbers stay what they are. In a local world the
transport does it to messages; they have no numbers there, so none comes twice.
"""

import collections
import enum
import itertools
import logging
import queue
import random
import threading
import time

from jdistgrad import errors
from jdistgrad.rpc.worker import current_worker
from jdistgrad.threads import started
from jdistgrad.wire import frames, launcher_env
from jdistgrad.wire.local import LocalTransport
from jdistgrad.wire.message import Kind
from jdistgrad.wire.polling import poll

LATE_SECONDS = 0.003
FRAME_TAG = 0
TO_FLUSH = 20.0

log = logging.getLogger(__name__)


class Fate(enum.Enum):
    """What may happen to a message. FAILED: sending it raises, as when a transport is broken."""

    DROPPED = "dropped"
    LATE = "late"
    TWICE = "twice"
    FAILED = "failed"


class Fates:
    """The choice of what happens to the messages of one worker: what is asked for, else what is drawn.

    Arguments:
      chance: draws.
      shares: how likely each fate is for a message that none was asked for.

    Attributes:
      met: how many messages of each kind met each fate.
    """

    def __init__(self, chance=None, shares=None):
        self.chance, self._shares = chance or random.Random(0), shares or {}
        self._asked = collections.defaultdict(collections.deque)
        self.met = collections.Counter()
        self._lock = threading.Lock()

    def ask(self, fate, *kinds, times=1):
        """Let the next messages of these kinds have a fate."""
        with self._lock:
            for kind in kinds:
                self._asked[kind].extend(times * [fate])

    def of(self, kind):
        """Return the fate of a message that is being sent, or None."""
        with self._lock:
            fate = self._asked[kind].popleft() if self._asked[kind] else self._drawn()
            if fate is not None:
                self.met[fate, kind] += 1
            return fate

    def __str__(self):
        return ", ".join(
            f"{kind.name} {fate.value} {times}" for (fate, kind), times in sorted(self.met.items(), key=str)
        )

    def _drawn(self):
        left = self.chance.random()
        for fate, share in self._shares.items():
            left -= share
            if left < 0:
                return fate
        return None

    def send_late(self, send):
        _later.put((time.monotonic() + self.chance.random() * LATE_SECONDS, next(_order), send))


class Communicator:
    """A communicator whose frames meet fates."""

    def __init__(self, comm, fates):
        self._comm, self._fates = comm, fates
        self._begun, self._beginning = [], threading.RLock()  # sends of copies: MPI uses their memory
        self._here = threading.local()

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Isend(self, message, peer, tag):  # noqa: N802
        from mpi4py import MPI

        if tag != FRAME_TAG:  # a large piece follows its frame, on the same thread
            return MPI.REQUEST_NULL if self._here.dropped else self._comm.Isend(message, peer, tag)
        fate = self._fates.of(frames.KINDS[message[0][4]])
        self._here.dropped = fate is Fate.DROPPED
        if fate is Fate.FAILED:
            raise MPI.Exception(MPI.ERR_OTHER)
        if fate is Fate.LATE:
            copy = bytes(message[0])
            self._fates.send_late(lambda: self._send_copy(copy, peer))
        if fate in (Fate.DROPPED, Fate.LATE):
            return MPI.REQUEST_NULL
        request = self._comm.Isend(message, peer, tag)
        if fate is Fate.TWICE:
            self._send_copy(bytes(message[0]), peer)
        return request

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


def sender(transport, fates):
    """Return a ``send`` for a transport of a local world, whose messages to other workers meet fates."""
    genuine = transport.send

    def send(peer, message):
        told_at_once = peer == transport.rank or message.kind is Kind.LEAVE  # the others see at once who has left
        fate = None if told_at_once else fates.of(message.kind)
        if fate is Fate.FAILED:
            raise errors.WireError(f"the message to rank {peer} could not be sent: it was to fail")
        if fate is Fate.LATE:
            fates.send_late(lambda: genuine(peer, message))
        elif fate is None:
            genuine(peer, message)
        elif fate is Fate.TWICE:
            raise ValueError("messages of a local world have no numbers, by which the second would be refused")

    return send


def make_unruly(transport=None, fates=None):
    """Let the messages that a worker sends to others meet fates; return their choice.

    Arguments:
      transport: by default that of this worker.
    """
    transport, fates = transport or current_worker().transport, fates or Fates()
    if transport.hands_over:
        transport.send = sender(transport, fates)
    else:
        transport._comm = Communicator(transport._comm, fates)
    return fates


def make_all_unruly(seed):
    """Let every world that is opened from now on deliver some messages late and, over MPI, some twice."""
    if launcher_env.launched():
        from jdistgrad.wire.mpi import MPITransport

        _make_unruly_from_the_start(MPITransport, seed, {Fate.LATE: 0.3, Fate.TWICE: 0.3})
    _make_unruly_from_the_start(LocalTransport, seed, {Fate.LATE: 0.3})


def _make_unruly_from_the_start(kind, seed, shares):
    start = kind.start

    def start_unruly(transport, receiver):
        make_unruly(transport, Fates(random.Random(seed + transport.rank), shares))
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
