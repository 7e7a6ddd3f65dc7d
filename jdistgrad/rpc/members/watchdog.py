"""What this worker does together with others, and whether they still come to it.

A call has a timeout and somebody who waits for its answer. In a collective each waits for all others, often inside MPI,
where nothing reaches it. So whoever takes part says so here. Those it needs are asked for a sign of life as peers with
calls are; after a while they are also asked where they are. One that is lost, or is shutting down, will never come:
waits that can be ended end with an error that says so, and for those inside MPI the job is ended.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Hashable
from types import FrameType

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.rpc.calls.caller import Caller
from jdistgrad.rpc.current import within
from jdistgrad.rpc.mailbox import Mailbox, current_part
from jdistgrad.rpc.members.peers import Peers

ASK_SECONDS = 2.0  # how long a worker takes part before the others are asked where they are, and how often
ANSWER_SECONDS = 1.0
CROSSED_SECONDS = 6.0  # how long two workers wait for each other in different places, until that is an error


@dataclasses.dataclass(frozen=True)
class Occasion:
    """What workers do together. They are in the same where group and turn are; each has words of its own for it."""

    what: str = dataclasses.field(compare=False)
    group: Hashable
    turn: int


@dataclasses.dataclass(eq=False)
class Engagement:
    """One collective this worker is in. ``blocking``: inside MPI, where only the end of the job ends it."""

    occasion: Occasion
    peers: frozenset[int]
    blocking: bool
    since: float = dataclasses.field(default_factory=time.monotonic)
    asked: float = 0.0
    error: errors.DistgradError | None = None
    elsewhere: dict[int, float] = dataclasses.field(default_factory=dict)  # peers, and since when they are
    crossed: "dict[int, tuple[Crossing, float]]" = dataclasses.field(default_factory=dict)  # peers, and since when

    def check(self) -> None:
        """Raise where somebody will never come."""
        if self.error is not None:
            raise self.error


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """What a worker says of itself.

    Attributes:
      there: whether it takes part in what it is asked about.
      closing: whether it is shutting down.
      place: the line of the user's program that it is in.
      awaits: where it waits for whoever asks.
    """

    there: bool
    closing: bool
    place: str
    awaits: frozenset[Occasion]


Crossing = tuple[frozenset[Occasion], str, str]  # where another waits for this worker, and the lines they are in


class Watchdog:
    """The collectives one worker is in.

    Arguments:
      closing: whether this worker is in ``shutdown``.
    """

    def __init__(self, mailbox: Mailbox, caller: Caller, peers: Peers, closing: Callable[[], bool]):
        self._mailbox, self._caller, self._peers, self._closing = mailbox, caller, peers, closing
        self._engaged: dict[int, Engagement] = {}

    def begin(self, occasion: Occasion, peers: Collection[int], *, blocking: bool) -> Engagement:
        """Take part in something with other workers, until ``end``. Raises where one of them is lost already."""
        one = Engagement(occasion, frozenset(peers) - {self._mailbox.rank}, blocking)
        self._engaged[id(one)] = one
        if self._peers.lost:
            for peer, why in list(self._peers.lost.items()):
                self.lost(peer, why)
            if one.error is not None:
                self.end(one)
            one.check()
        return one

    def end(self, engagement: Engagement) -> None:
        self._engaged.pop(id(engagement), None)

    def awaited(self) -> set[int]:
        """Whose silence would keep this worker waiting."""
        return set().union(*(one.peers for one in list(self._engaged.values())))

    def lost(self, peer: int, why: str) -> None:
        """A worker will not come any more."""
        for one in list(self._engaged.values()):
            if peer in one.peers:
                self._give_up(one, peer, why)

    def _give_up(self, one: Engagement, peer: int, why: str) -> None:
        mailbox = self._mailbox
        text = f"{mailbox.info} has waited for {time.monotonic() - one.since:.0f} s ({one.occasion.what}): {why}"
        if one.blocking:
            mailbox.process.end_job(text)
        elif one.error is None:
            one.error = errors.WorkerLostError(text, worker=mailbox.directory.workers[peer])

    def look(self, now: float) -> None:
        """Ask the others where they are, now and then."""
        for one in list(self._engaged.values()):
            if now - max(one.since, one.asked) >= ASK_SECONDS and one.error is None:
                one.asked = now
                self._mailbox.run(functools.partial(self._ask, one))

    def _ask(self, one: Engagement) -> None:
        for peer, found in self.ask(one.peers, one.occasion).items():
            if found.there:
                one.elsewhere.pop(peer, None)
                one.crossed.pop(peer, None)
                continue
            reason = self._reason(one, peer, found)
            if reason is not None and one.error is None and id(one) in self._engaged:
                self._tell_those_crossed(one)
                self._give_up(one, peer, reason)

    def _reason(self, one: Engagement, peer: int, found: Whereabouts) -> str | None:
        """Why a worker that is elsewhere will not come; None: it still may.

        Who has passed on much data may be done with a collective long before the others are.
        """
        info, now = self._mailbox.directory.workers[peer], time.monotonic()
        away = now - one.elsewhere.setdefault(peer, now)
        if one.blocking:
            left = f"{info} came to its beginning and is elsewhere now, at {found.place}"
            return left if away >= settings.silence_seconds else None
        if found.closing:
            gone = f"{info} will not come, it is in jdistgrad.shutdown(), at {found.place}"
            return gone if away >= ASK_SECONDS else None
        return self._crossed(one, peer, found)

    def _crossed(self, one: Engagement, peer: int, found: Whereabouts) -> str | None:
        """Why two workers that wait for each other never meet; None: one of them may still come to the other.

        A thread of theirs that computes may do so: then the lines they are in change, if only now and then.
        """
        here = {each.occasion for each in list(self._engaged.values())}
        crossing = found.awaits - here, found.place, where(self._mailbox.home)
        before, since = one.crossed.get(peer, (None, 0.0))
        now = time.monotonic()
        if crossing != before:
            one.crossed[peer] = crossing, now
            return None
        if not crossing[0] or now - since < CROSSED_SECONDS:
            return None
        return self._waits_elsewhere(peer, crossing[0], found.place)

    def _waits_elsewhere(self, peer: int, awaited: Collection[Occasion], place: str) -> str:
        return (
            f"{self._mailbox.directory.workers[peer]} will not come, it waits for this worker elsewhere "
            f"({' and '.join(sorted(each.what for each in awaited))}), at {place}. Every rank must use its "
            "DataParallels and collectives in one order."
        )

    def _tell_those_crossed(self, one: Engagement) -> None:
        """Who is found here to wait in vain is told so: asked later, this worker will be somewhere else."""
        place = where(self._mailbox.home)
        with within(None):
            for peer, ((awaited, _, _), _) in one.crossed.items():
                if awaited:
                    args = self._mailbox.rank, one.occasion, awaited, place
                    self._caller.rpc_async(peer, crossed, args, {}, ANSWER_SECONDS)

    def told_crossed(self, peer: int, occasion: Occasion, mine: Collection[Occasion], place: str) -> None:
        for one in list(self._engaged.values()):
            if one.occasion in mine and one.error is None:
                self._tell_those_crossed(one)
                self._give_up(one, peer, self._waits_elsewhere(peer, [occasion], place))

    def ask(self, peers: Collection[int], occasion: Occasion) -> dict[int, Whereabouts]:
        """Where those who answer are."""
        with within(None):
            asked = {
                peer: self._caller.rpc_async(peer, whereabouts, (self._mailbox.rank, occasion), {}, ANSWER_SECONDS)
                for peer in peers
                if peer not in self._peers.lost
            }
        return {peer: future.result() for peer, future in asked.items() if future.exception() is None}

    def whereabouts(self, asker: int, occasion: Occasion) -> Whereabouts:
        shared = [one for one in list(self._engaged.values()) if asker in one.peers]
        awaits = frozenset(one.occasion for one in shared if not one.blocking)
        there = any(one.occasion == occasion for one in shared)
        return Whereabouts(there, self._closing(), where(self._mailbox.home), awaits)


def whereabouts(asker: int, occasion: Occasion) -> Whereabouts:
    """Served by every worker."""
    return current_part(Watchdog).whereabouts(asker, occasion)


def crossed(peer: int, occasion: Occasion, mine: Collection[Occasion], place: str) -> None:
    """Served by every worker: what it waits in never comes about, another waits for it elsewhere."""
    current_part(Watchdog).told_crossed(peer, occasion, mine, place)


def where(thread: int) -> str:
    """The innermost line of the user's program that a thread is in: not of this package, nor of installed ones."""
    frame: FrameType | None = sys._current_frames().get(thread)
    innermost = frame
    while frame is not None and _is_installed(frame):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "its end"
    name = pathlib.Path(found.f_code.co_filename).name
    return f"{name}:{found.f_lineno}, in {found.f_code.co_qualname}"


def _is_installed(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    library = "site-packages" in file or file.startswith((sys.base_prefix, "<frozen"))
    return library or module.partition(".")[0] == "jdistgrad"
