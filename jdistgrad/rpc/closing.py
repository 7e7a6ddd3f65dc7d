"""The shutdown of a world, seen from one worker: serve until all workers want to close and nothing is under way.

The worker of the lowest rank conducts. In a world that survives, another may have to take its place, even while it
sends CLOSE. So there each worker forwards CLOSE to all, and leaves when it has received CLOSE from all: no worker takes
the exit of another for its death.

Termination is detected by Mattern's four counters (1987), in ``Survey``, which has neither clock nor I/O. A survey asks
every worker how much work it has sent and received, whether it is busy, and whether it wants to close. A world is quiet
when all workers want to close, none is busy, as much was received as sent, and the previous survey saw the same
numbers: then nothing was on its way in between. A lost worker is left out: each worker reports whom it has lost, and
counts only messages to and from the others. Nobody takes messages of a lost worker any more, so the counts of workers
that have lost the same ones balance as above.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jdistgrad import errors
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.mailbox import Mailbox, WorkerPart
from jdistgrad.rpc.peers import Peers
from jdistgrad.wire.message import Message, MessageType
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.2e-3, 20e-3
LOOK_SECONDS = 0.05
SPEAK_SECONDS = 10.0
ASK_SECONDS = 2.0  # wait for reports that are only needed for a message
TOGETHER_SECONDS = 5.0
SHOWN = 3  # calls of one worker

log = logging.getLogger("jdistgrad.rpc")


class SurveyReport(NamedTuple):
    """A worker's answer to a survey.

    Attributes:
      sent, received: how many messages that carry work.
      serving: for people to read: functions, the ranks that have called them, and for how many seconds they run.
      lost: the workers that it has lost, in order; their messages are not counted.
    """

    closing: bool
    busy: bool
    sent: int
    received: int
    serving: tuple[tuple[str, int, float], ...] = ()
    lost: tuple[int, ...] = ()


class Survey:
    """The reports of one round after another, until the world is quiet.

    Attributes:
      awaited: the workers that are not lost.
      reports: those of this round, by worker. ``before``: those of the round before.
    """

    def __init__(self, size: int):
        self.awaited = set(range(size))
        self.reports: dict[int, SurveyReport] = {}
        self.before: dict[int, SurveyReport] = {}

    @property
    def complete(self) -> bool:
        return self.awaited <= self.reports.keys()

    def conclude(self) -> bool:
        """End the round; return True when the world is quiet. Every worker that is not lost must have reported."""
        assert self.complete
        now = {rank: report for rank, report in self.reports.items() if rank in self.awaited}
        reports = now.values()
        still = all(report.closing and not report.busy for report in reports)
        balanced = sum(report.sent for report in reports) == sum(report.received for report in reports)
        agreed = len({report.lost for report in reports}) == 1
        unchanged = _counts(now) == _counts(self.before)
        self.before, self.reports = now, {}
        return still and balanced and agreed and unchanged


def _counts(reports: Mapping[int, SurveyReport]) -> dict[int, SurveyReport]:
    return {rank: report._replace(serving=()) for rank, report in reports.items()}


def describe(workers: Sequence[Any], reports: Mapping[int, SurveyReport], lost: Collection[int] = ()) -> str:
    """Describe which workers that are not lost keep a world open, and by what, from their reports."""
    callers = {caller for report in reports.values() for _, caller, _ in report.serving}
    found = []
    for worker in workers:
        report = reports.get(worker.rank)
        if worker.rank in lost:
            continue
        if report is None:
            found.append(f"for {worker}, which does not answer")
            continue
        doing = [] if report.closing else ["has not called shutdown"]
        if report.serving:
            shown = report.serving[:SHOWN]
            calls = [f"{what}, called by {workers[caller]} {seconds:.0f} s ago" for what, caller, seconds in shown]
            more = len(report.serving) - SHOWN
            doing.append("serves " + ", and ".join(calls) + (f", and {more} more calls" if more > 0 else ""))
        elif report.closing and report.busy and worker.rank not in callers:
            doing.append("has calls in flight")
        if doing:
            found.append(f"for {worker}, which {' and '.join(doing)}")
    return "; ".join(found) or "for messages on their way"


class Patience:
    """The times at which a wait is logged: after ``seconds`` without a message, then after twice as long, and so on.

    A worker that only serves is in ``shutdown`` for as long as the others need it.
    """

    def __init__(self, seconds: float, now: float):
        self._seconds, self.next_look, self._enough, self._still_since = seconds, now + seconds, seconds, now
        self._before: Any = None

    def ends(self, reports: Mapping[int, SurveyReport], now: float) -> bool:
        """Return whether to log these reports now. If all workers want to close, messages do not postpone that."""
        self.next_look = now + self._seconds
        moved = {rank: (report.sent, report.received) for rank, report in reports.items()}
        if moved != self._before and not all(report.closing for report in reports.values()):
            self._still_since = now
        self._before, still = moved, now - self._still_since
        if still < self._enough:
            return False
        self._enough = 2 * still
        return True


class Closing(WorkerPart):
    """A worker's part in closing the world. It answers surveys from the start; ``run`` takes part in the shutdown.

    Arguments:
      flush: sends the weights that have been dropped here.

    Attributes:
      wanted: whether this worker is in ``shutdown``, and ``since`` when.
      gone: the workers that have received CLOSE too, or have ended.
      only_serves: whether it has no program.
      gave_up: the error text of the latest ``run``, if it timed out.
    """

    def __init__(self, mailbox: Mailbox, peers: Peers, flush: Callable[[], None]):
        self._mailbox, self._peers, self._flush = mailbox, peers, flush
        self.wanted = self.only_serves = False
        self.told_to_close = threading.Event()
        self.gone: set[int] = set()
        self.since = 0.0
        self._survey, self._round, self._round_complete = Survey(mailbox.size), 0, threading.Event()
        self._timeout = self._deadline = math.inf
        self._patience = Patience(math.inf, 0.0)
        self.gave_up: str | None = None

    @property
    def conductor(self) -> int:
        """Return the rank of the worker that finds out when the world is quiet."""
        return min(self._peers.others | {self._mailbox.rank})

    def awaited(self) -> set[int]:
        if not self.wanted or self.told_to_close.is_set():
            return set()
        return {self.conductor} if self._mailbox.rank != self.conductor else self._peers.others

    def run(self, timeout: float, *, only_serves: bool = False) -> None:
        """Return when the world is quiet, together with all other workers.

        Arguments:
          only_serves: whether this worker has no program. Otherwise what a long wait is for is reported, as warnings of
            the logger ``jdistgrad.rpc``, which Python prints to stderr unless the program configures logging.

        Raises:
          CallTimeoutError: the world was not quiet within ``timeout`` seconds; the message names the workers that it
            waited for. The world stays open.
          WorkerLostError: a worker was lost.
        """
        mailbox, now = self._mailbox, time.monotonic()
        self._timeout, self._deadline = timeout, now + timeout
        self._check()
        self.gave_up, self.only_serves = None, only_serves
        self._patience = Patience(math.inf if only_serves else SPEAK_SECONDS, now)
        self.wanted, self.since = True, now
        mailbox.transport.serve_only(only=True)
        try:
            while not self.told_to_close.is_set():
                if mailbox.rank == self.conductor:
                    self._conduct()
                self._wait(self.told_to_close)
            if mailbox.survives:
                poll(lambda: self.gone >= self._peers.others, TOGETHER_SECONDS)
        except errors.CallTimeoutError as error:
            self.wanted = False
            mailbox.transport.serve_only(only=False)
            self.gave_up = str(error)
            raise

    def _conduct(self) -> None:
        pause = FIRST_PAUSE
        while True:
            self._ask_everybody()
            self._wait(self._round_complete)
            if self._survey.conclude():
                break
            self._check()
            self._log_wait()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._tell_all(MessageType.CLOSE)

    def _ask_everybody(self) -> None:
        self._round += 1
        self._survey.reports = {}  # those of a round that was given up do not count
        self._round_complete.clear()
        self._tell_all(MessageType.SURVEY)

    def _tell_all(self, kind: MessageType) -> None:
        mailbox = self._mailbox
        for peer in sorted(self._peers.others | {mailbox.rank}):
            error = mailbox.tell(peer, Message(kind, mailbox.rank, self._round))
            if error is not None:
                raise error

    def _wait(self, event: threading.Event) -> None:
        """Wait for an event, or until another worker has to conduct."""
        conductor = self.conductor
        while self.conductor == conductor:
            if event.wait(min(LOOK_SECONDS, max(0.0, self._deadline - time.monotonic()))):
                return
            self._check()
            self._log_wait()

    def _check(self) -> None:
        """Raise if the world will not close, or not in time."""
        mailbox, lost, what = self._mailbox, self._peers.lost, f"shutdown of {self._mailbox.info}"
        if mailbox.failure is not None:
            raise mailbox.failure
        if lost and not mailbox.survives:
            raise errors.WorkerLostError(f"{what}: " + "; ".join(lost.values()))
        if mailbox.closed:
            raise errors.WorldClosedError(f"{what}: another thread has left the world meanwhile")
        if time.monotonic() >= self._deadline:
            self._deadline = math.inf  # for the last reports
            waited_for = describe(mailbox.directory.workers, self._reports(), lost)
            raise errors.CallTimeoutError(
                f"{what}: waited {self._timeout:g} s {waited_for}. Every worker must call shutdown(); "
                "shutdown(graceful=False) leaves without waiting.",
                seconds=self._timeout,
            )

    def _log_wait(self) -> None:
        """Warn, now and then, of what the shutdown waits for; only the lowest rank in ``shutdown`` does so."""
        now, mailbox = time.monotonic(), self._mailbox
        if now < self._patience.next_look:
            return
        reports = self._reports()
        lowest = min((rank for rank, report in reports.items() if report.closing), default=None)
        if self._patience.ends(reports, now) and lowest == mailbox.rank:
            waited_for = describe(mailbox.directory.workers, reports, self._peers.lost)
            log.warning("shutdown of %s: waiting %.0f s %s", mailbox.info, now - self.since, waited_for)

    def _reports(self) -> dict[int, SurveyReport]:
        """Return the latest report of each worker that has given one. Who conducts has asked for them already."""
        if self._mailbox.rank != self.conductor:
            self._ask_everybody()
        end = time.monotonic() + ASK_SECONDS
        while not (self.told_to_close.is_set() or time.monotonic() > end or self._round_complete.wait(LOOK_SECONDS)):
            pass
        return {**self._survey.before, **self._survey.reports}

    # On the transport's thread.

    def handle(self, message: Message) -> None:
        if message.kind is MessageType.SURVEY:
            reply = Message(MessageType.REPORT, self._mailbox.rank, message.id, tuple(self._report()))
            self._mailbox.post(message.source, reply)
        elif message.kind is MessageType.REPORT and message.id == self._round:
            self._survey.reports[message.source] = SurveyReport(*message.body)
            if self._survey.complete:
                self._round_complete.set()
        elif message.kind is MessageType.CLOSE and self.wanted:
            self.gone.add(message.source)
            if self._mailbox.survives and not self.told_to_close.is_set():  # who says so first may have died meanwhile
                self.told_to_close.set()
                self._tell_all(MessageType.CLOSE)
            self.told_to_close.set()
        elif message.kind is MessageType.CLOSE:  # this worker timed out just as the others found the world quiet
            for peer in self._peers.others:
                self._peers.lose(peer, "the world was shut down without waiting for this worker any longer")

    def on_lost(self, peer: WorkerInfo, why: str) -> None:
        if self._mailbox.survives:
            self._survey.awaited.discard(peer.rank)
            if self._survey.complete:
                self._round_complete.set()

    def _report(self) -> SurveyReport:
        try:
            self._flush()
        except errors.WireError as error:  # who conducts the end waits for this report
            log.error("%s: weights dropped before the end were not sent: %s", self._mailbox.info, error)
        mailbox, lost, now = self._mailbox, tuple(sorted(self._peers.lost)), time.monotonic()
        sent, received, serving = mailbox.work.counts(lost)
        busy = bool(serving or any(part.busy for part in mailbox.parts))
        running = tuple((str(one), one.peer, now - one.since) for one in list(mailbox.running.values()))
        return SurveyReport(self.wanted, busy, sent, received, running, lost)
