"""The watchdog of collectives: track those that this worker waits in, and find out whether the others still come.

In a collective each worker waits for all others, often inside MPI, where no message reaches it. So a worker that enters
a collective registers it here. The other participants are asked for a sign of life, like peers in whose calls this
worker waits, and after a while for their location. A participant that is lost or is shutting down will never come: then
a wait outside MPI ends with an error, and a wait inside MPI ends the job.
"""

import dataclasses
import functools
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import FrameType

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.ffi.sites import is_cancelled
from jdistgrad.rpc.caller import Caller
from jdistgrad.rpc.closing import Closing
from jdistgrad.rpc.current import within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import Mailbox, WorkerPart, current_mailbox, current_part
from jdistgrad.rpc.peers import Peers
from jdistgrad.threads import frames
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.transport import Awaited

ASK_SECONDS = 2.0  # how long a worker takes part before the others are asked where they are, and how often
ANSWER_SECONDS = 1.0
LOOK_SECONDS = 0.05  # how often a worker that waits looks whether its watchdog has found an error
FEWER_STEPS = (
    "Every rank must take part in the same steps and collectives before its shutdown(); ranks with fewer batches need "
    "DataParallel.join()"
)
ONLY_SERVES = (
    "has no program, and only serves calls. Let all workers call the collective, also this one: jd.rpc_all(workers, "
    "function_with_the_collective)"
)
PACKAGE = str(pathlib.Path(__file__).parents[1])


@dataclasses.dataclass(frozen=True)
class CollectiveEntry:
    """A collective. Workers are in the same one if group and turn are equal.

    Attributes:
      what: each worker's own description.
      may_leave: whether a worker may leave long before the others: the collective is a program that goes on after its
        last reduction.
      by_calls: whether it is a meeting of workers that save together, which their own calls bring about.
    """

    what: str = dataclasses.field(compare=False)
    group: Hashable
    turn: int
    may_leave: bool = False
    by_calls: bool = False


class InterruptedCollectiveError(errors.CollectiveError):
    """A compiled program was interrupted in a collective."""


class WatchedBlock:
    """A block in which a worker takes part in a collective with others, and its watchdog knows.

    Arguments:
      ranks: the world ranks of all participants.
      blocking: whether the block is inside MPI, where only ``interrupt``, or else the end of the job, ends a wait.
      interrupt: ends the collective on all ranks, if they can go on without those that are lost.
      goes_on: whether the others do not wait for a lost worker.
      explain: takes an error that ends the block; it may raise a better one.

    Attributes:
      absent: the peers that will not come if that stays so, and since when.
    """

    def __init__(
        self,
        worker: Mailbox,
        entry: CollectiveEntry,
        ranks: Sequence[int],
        *,
        blocking: bool = False,
        interrupt: Callable[[], None] | None = None,
        goes_on: bool = False,
        explain: Callable[[Exception], None] = lambda error: None,
    ):
        self.worker, self._watchdog, self.entry = worker, worker.part(Watchdog), entry
        self.peers, self.has_others = frozenset(ranks) - {worker.rank}, len(ranks) > 1
        self.blocking, self.interrupt, self.goes_on, self._explain = blocking, interrupt, goes_on, explain
        self.thread, self.since, self.asked = 0, 0.0, 0.0
        self.error: errors.DistgradError | None = None
        self.absent: dict[int, float] = {}

    def __enter__(self) -> "WatchedBlock":
        if self.has_others:
            self._watchdog.begin(self)
        return self

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        self._watchdog.end(self)
        if isinstance(error, Exception):
            self._explain(error)

    def check(self) -> None:
        """Raise if somebody that this worker waits for will not come, or its own program has been ended."""
        if is_cancelled():
            raise InterruptedCollectiveError(f"{self.entry.what}: Ctrl-C has ended the program that waited in it.")
        if self.worker.failure is not None:
            raise self.worker.failure.with_traceback(None)
        if self.error is not None:
            raise self.error

    def wait(self, target: Awaited, timeout: float) -> bool:
        """Wait until messages have completed the target; return False after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not target.done:
            self.check()
            now = time.monotonic()
            if now >= end:
                return False
            with put_off_interrupt():
                self.worker.transport.wait(target, min(end, now + LOOK_SECONDS))
        return True

    def places(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return where some of the participants are in their programs, as far as they still answer."""
        return {rank: found.place for rank, found in self._watchdog.ask(ranks, self.entry).items()}

    def unfinished(self) -> str:
        """Say which participants are still in the collective, and where in their programs."""
        others = sorted(self.peers)
        found, names = self._watchdog.ask(others, self.entry), self.worker.directory.workers
        inside = [f"{names[rank]} at {found[rank].place}" for rank in others if rank in found and found[rank].there]
        left = [f"{names[rank]} at {found[rank].place}" for rank in others if rank in found and not found[rank].there]
        silent = [str(names[rank]) for rank in others if rank not in found]
        groups = ("Still in it too", inside), ("Not in it", left), ("Without an answer", silent)
        return " ".join(f"{what}: {', '.join(those)}." for what, those in groups if those)


@dataclasses.dataclass(frozen=True)
class Location:
    """A worker's answer to the question where it is.

    Attributes:
      there: whether it is in the collective that the question is about.
      closing: why it will not come, if it is shutting down, and serves no call that may still come to the collective.
      place: the line of the user's program that it is in.
    """

    there: bool
    closing: str
    place: str


class Watchdog(WorkerPart):
    """The collectives that one worker is in.

    Arguments:
      sent: how many words this worker has sent to each group, and letters of each kind.

    Attributes:
      all: the collectives, and the meetings by calls, that threads of this worker are in.
    """

    def __init__(self, mailbox: Mailbox, caller: Caller, peers: Peers, closing: Closing, sent: Mapping[Hashable, int]):
        self._mailbox, self._caller, self._peers, self.closing = mailbox, caller, peers, closing
        self._sent = sent
        self.all: dict[int, WatchedBlock] = {}

    def begin(self, one: WatchedBlock) -> None:
        """Register a collective with other workers, until ``end``. Raises if it blocks and one of them is lost."""
        one.thread, one.since = threading.get_ident(), time.monotonic()
        self.all[id(one)] = one
        for peer, why in list(self._peers.lost.items()):
            self.on_lost(self._mailbox.directory.workers[peer], why)
        if one.blocking and one.error is not None:
            self.end(one)
            raise one.error

    def end(self, block: WatchedBlock) -> None:
        self.all.pop(id(block), None)

    def awaited(self) -> set[int]:
        return set().union(*(one.peers for one in list(self.all.values())))

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        for one in list(self.all.values()):
            if peer.rank in one.peers and one.goes_on:
                one.peers -= {peer.rank}
            elif peer.rank in one.peers:
                self._give_up(one, peer.rank, why)

    def _give_up(self, one: WatchedBlock, peer: int, why: str) -> None:
        mailbox = self._mailbox
        what = f"{one.entry.what}, at {where(mailbox.home)}"
        text = f"{mailbox.info} has waited for {time.monotonic() - one.since:.0f} s ({what}): {why}"
        if one.blocking and one.interrupt is None:
            mailbox.end_job(text)
        elif one.error is None:
            one.error = errors.WorkerLostError(text, worker=mailbox.directory.workers[peer])
            if one.interrupt is not None:
                one.interrupt()

    def tick(self, now: float) -> None:
        for one in list(self.all.values()):
            if not one.entry.by_calls and now - max(one.since, one.asked) >= ASK_SECONDS and one.error is None:
                one.asked = now
                self._mailbox.run(functools.partial(self._ask, one))

    def _ask(self, one: WatchedBlock) -> None:
        for peer, found in self.ask(one.peers, one.entry).items():
            absence = None if found.there or one.entry.may_leave else self._absence(one, peer, found)
            if absence is None:
                one.absent.pop(peer, None)
                continue
            (why, seconds), now = absence, time.monotonic()
            since = one.absent.setdefault(peer, now)
            if now - since >= seconds and one.error is None and id(one) in self.all:
                self._give_up(one, peer, why)

    def _absence(self, one: WatchedBlock, peer: int, found: Location) -> tuple[str, float] | None:
        """Return why a worker will not come, if that stays so for some seconds, and the seconds; None if it may come.

        A worker that has passed on much data may leave a blocking collective long before the others do. A worker that
        is in ``shutdown`` itself takes part because it was called: the other may be called later.
        """
        info = self._mailbox.directory.workers[peer]
        if one.blocking:
            return f"{info} entered this collective and is elsewhere now, at {found.place}", settings.silence_seconds
        if found.closing and not self.closing.wanted:
            return f"{info} will not come, it {found.closing}", ASK_SECONDS
        return None

    def has_sent(self, entry: CollectiveEntry) -> bool:
        """Return whether this worker has sent its word, or the letter, that an entry is about: it need not stay."""
        return self._sent.get(entry.group, -1) > entry.turn

    def ask(self, peers: Collection[int], entry: CollectiveEntry) -> dict[int, Location]:
        with within(None):
            asked = {
                peer: self._caller.rpc_async(peer, location, (self._mailbox.rank, entry), {}, ANSWER_SECONDS)
                for peer in peers
                if peer not in self._peers.lost
            }
        return {peer: future.result() for peer, future in asked.items() if future.exception() is None}


# Functions that every worker serves for the watchdogs of others.


def location(asker: int, entry: CollectiveEntry) -> Location:
    dog, worker = current_part(Watchdog), current_mailbox()
    there = dog.has_sent(entry) or any(one.entry == entry for one in list(dog.all.values()) if asker in one.peers)
    serves_users = any(one.thread and one.function is not location for one in list(worker.running.values()))
    if dog.closing.only_serves:
        place, closing = "jdistgrad.local_workers(), without a program", ONLY_SERVES
    else:
        place = where(worker.home)
        closing = f"is in jdistgrad.shutdown(), at {place}. {FEWER_STEPS}"
    return Location(there, closing if dog.closing.wanted and not serves_users else "", place)


# The lines of the user's program that threads are in: neither this package nor installed code.


def where(thread: int) -> str:
    """Return the innermost line of the user's program that a thread is in; without one, the innermost line."""
    frame = innermost = frames().get(thread)
    while frame is not None and _is_installed(frame):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "its end"
    return f"{pathlib.Path(found.f_code.co_filename).name}:{found.f_lineno}, in {found.f_code.co_qualname}"


def _is_installed(frame: FrameType) -> bool:
    """Return whether code belongs to this package, to another installed one or to Python."""
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    library = "site-packages" in file or file.startswith((sys.base_prefix, PACKAGE, "<frozen"))
    return library or module.partition(".")[0] == "jdistgrad"
