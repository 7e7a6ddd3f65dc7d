"""The shutdown of a world, seen from one worker: serve until all workers want to close and nothing is under way.

The worker of the lowest rank conducts. In a world that survives, another may have to go on in its place, even while it
tells the others to close. So there each worker passes the word on to all, and leaves when it has heard it from all: a
worker that is told to close is never alone with that, and nobody takes the exit of another for its death.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator

from jdistgrad import errors
from jdistgrad.rpc.calls.callbacks import CALL, ON_LOST, Callbacks
from jdistgrad.rpc.calls.caller import Caller
from jdistgrad.rpc.functions import describe as described
from jdistgrad.rpc.mailbox import Mailbox
from jdistgrad.rpc.members.losses import Losses
from jdistgrad.rpc.members.peers import Peers
from jdistgrad.rpc.members.termination import Report, Survey
from jdistgrad.rpc.members.waiting import Patience, describe
from jdistgrad.rpc.references.releasing import Releasing
from jdistgrad.rpc.serving.being_served import BeingServed, Serving
from jdistgrad.wire.interrupts import put_off_interrupt
from jdistgrad.wire.message import Kind, Message
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.2e-3, 20e-3
LOOK_SECONDS = 0.05
SPEAK_SECONDS = 10.0
ASK_SECONDS = 2.0  # wait for reports that are only needed for a message
TOGETHER_SECONDS = 5.0

log = logging.getLogger("jdistgrad.rpc")


class Closing:
    """A worker's part in closing the world. It answers surveys from the start; ``run`` takes part in the shutdown.

    Attributes:
      gave_up: the error text of the latest ``run``, if it timed out.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        caller: Caller,
        callbacks: Callbacks,
        peers: Peers,
        losses: Losses,
        releasing: Releasing,
        being_served: BeingServed,
    ):
        self._mailbox, self._caller, self._callbacks = mailbox, caller, callbacks
        self._peers, self._losses = peers, losses
        self._releasing, self._being_served = releasing, being_served
        self._turn = threading.Lock()
        self._wants_to_close = False
        self._told_to_close = threading.Event()
        self._gone: set[int] = set()  # after this worker was told to close: who has been told too, or has ended
        self._survey = Survey(mailbox.size)
        self._round = 0
        self._round_complete = threading.Event()
        self._patience = Patience(math.inf, 0.0)
        self.gave_up: str | None = None
        self.only_serves = False

    @property
    def told(self) -> bool:
        """Return whether the world is closing: nobody needs a worker that ends from now on."""
        return self._told_to_close.is_set()

    @property
    def conductor(self) -> int:
        """Return the rank of the worker that finds out when the world is quiet."""
        return min(set(range(self._mailbox.size)) - self._peers.lost.keys(), default=self._mailbox.rank)

    @property
    def wanted(self) -> bool:
        """Return whether this worker is in ``shutdown``."""
        return self._wants_to_close

    def waited(self, now: float) -> float | None:
        """Return how long this worker has been in ``shutdown``, or None."""
        return self._patience.waited(now) if self._wants_to_close else None

    @contextlib.contextmanager
    def turn(self, timeout: float) -> Iterator[None]:
        """Let the threads of this worker that call ``shutdown`` do so one after another.

        Raises:
          CallTimeoutError: another thread was still in it after ``timeout`` seconds.
        """
        deadline, mine = time.monotonic() + timeout, False
        try:
            while not mine:
                with put_off_interrupt():  # which would leave the lock to nobody
                    mine = self._turn.acquire(timeout=LOOK_SECONDS)
                if not mine and time.monotonic() >= deadline:
                    raise self._other_thread(timeout)
            yield
        finally:
            if mine:
                self._turn.release()

    def _other_thread(self, timeout: float) -> errors.CallTimeoutError:
        return errors.CallTimeoutError(
            f"shutdown of {self._mailbox.info}: waited {timeout:g} s for another thread of this worker, which is in "
            "shutdown, too. Call it in one thread; shutdown(graceful=False) leaves without waiting.",
            seconds=timeout,
        )

    def run(self, timeout: float, *, only_serves: bool = False) -> None:
        """Return when the world is quiet, together with all other workers.

        Arguments:
          only_serves: whether this worker has no program. Otherwise what a long wait is for is reported, as warnings of
            the logger ``jdistgrad.rpc``, which Python prints to stderr unless the program configures logging.

        Raises:
          CallTimeoutError: the world was not quiet within ``timeout`` seconds; the message names the workers that it
            waited for. The world stays open.
          WorkerLostError: a worker was lost.
          WorldClosedError: another thread of this worker has left the world without waiting.
        """
        self._check(math.inf, timeout)
        now = time.monotonic()
        self.gave_up, self._patience = None, Patience(math.inf if only_serves else SPEAK_SECONDS, now)
        self.only_serves = only_serves
        deadline = now + timeout
        self._want_to_close(wanted=True)
        try:
            while not self._told_to_close.is_set():
                if self._mailbox.rank == self.conductor:
                    self._conduct(deadline, timeout)
                self._wait(self._told_to_close, deadline, timeout)
            if self._mailbox.survives:
                poll(self._all_gone, TOGETHER_SECONDS)
        except errors.CallTimeoutError as error:
            self._want_to_close(wanted=False)
            self.gave_up = str(error)
            raise

    def _want_to_close(self, *, wanted: bool) -> None:
        self._wants_to_close = wanted
        self._mailbox.transport.serve_only(only=wanted)

    def _conduct(self, deadline: float, timeout: float) -> None:
        pause = FIRST_PAUSE
        while not self._survey_once(deadline, timeout):
            self._check(deadline, timeout)
            self._log_wait()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._tell_all(Kind.CLOSE)

    def _survey_once(self, deadline: float, timeout: float) -> bool:
        self._ask_everybody()
        self._wait(self._round_complete, deadline, timeout)
        return self._survey.conclude()

    def _ask_everybody(self) -> None:
        self._round += 1
        self._survey.start()
        self._round_complete.clear()
        self._tell_all(Kind.SURVEY)

    def _tell_all(self, kind: Kind) -> None:
        for peer in sorted(
            set(range(self._mailbox.size)) - (self._peers.lost.keys() if self._mailbox.survives else set())
        ):
            try:
                self._mailbox.post(peer, Message(kind, self._mailbox.rank, self._round))
            except errors.WorldClosedError:
                self._check(math.inf, math.inf)  # its error gives the reason
                raise
            except errors.WorkerLostError:
                self._check(math.inf, math.inf)  # the same
                if self._mailbox.survives:
                    continue
                if kind is not Kind.SURVEY or self._mailbox.rank == self.conductor:
                    raise
                # Otherwise the peer has left because it was told to close; this worker will be told too.

    def _wait(self, event: threading.Event, deadline: float, timeout: float) -> None:
        """Wait for an event, or until another worker has to conduct."""
        conductor = self.conductor
        while self.conductor == conductor and not event.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            self._check(deadline, timeout)
            self._log_wait()

    # Messages about a long wait.

    def _log_wait(self) -> None:
        """Warn, now and then, of what the shutdown waits for; only the lowest rank in ``shutdown`` does so."""
        now, mailbox = time.monotonic(), self._mailbox
        if not self._patience.wants_to_look(now):
            return
        reports = self._reports()
        lowest = min((rank for rank, report in reports.items() if report.closing), default=None)
        if self._patience.ends(reports, now) and lowest == mailbox.rank:
            waited = self._patience.waited(now)
            log.warning("shutdown of %s: waiting %.0f s %s", mailbox.info, waited, self._describe(reports))

    def _reports(self) -> dict[int, Report]:
        """Return the latest report of each worker that has given one. The coordinator has asked for them already."""
        if self._mailbox.rank != self.conductor:
            self._ask_everybody()
        end = time.monotonic() + ASK_SECONDS
        while not (self._told_to_close.is_set() or time.monotonic() > end):
            if self._round_complete.wait(LOOK_SECONDS):
                break
        return self._survey.known()

    def _describe(self, reports: dict[int, Report]) -> str:
        return describe(self._mailbox.directory.workers, reports, self._peers.lost)

    def _check(self, deadline: float, timeout: float) -> None:
        mailbox, lost = self._mailbox, self._peers.lost
        if mailbox.failure is not None:
            raise mailbox.failure
        if lost and not mailbox.survives:
            raise errors.WorkerLostError(f"shutdown of {mailbox.info}: " + "; ".join(lost.values()))
        if mailbox.closed:
            raise errors.WorldClosedError(
                f"shutdown of {mailbox.info}: another thread has left the world meanwhile, with "
                "shutdown(graceful=False)"
            )
        if time.monotonic() >= deadline:
            raise self._too_late(timeout)

    def _too_late(self, timeout: float) -> errors.CallTimeoutError:
        waited = f"shutdown of {self._mailbox.info}: waited {timeout:g} s"
        return errors.CallTimeoutError(
            f"{waited} {self._describe(self._reports())}. Every worker must call shutdown(); shutdown(graceful=False) "
            f"leaves without waiting.",
            seconds=timeout,
        )

    # On the transport's thread.

    def handle(self, message: Message) -> None:
        if message.kind is Kind.SURVEY:
            reply = Message(Kind.REPORT, self._mailbox.rank, message.id, self._report().plain())
            self._mailbox.post(message.source, reply)
        elif message.kind is Kind.REPORT and message.id == self._round:
            self._survey.add(message.source, Report.of(message.body))
            if self._survey.complete:
                self._round_complete.set()
        elif message.kind is Kind.CLOSE and self._wants_to_close:
            self._closes(message.source)
        elif message.kind is Kind.CLOSE:  # this worker timed out just as the others found the world quiet
            for peer in set(range(self._mailbox.size)) - {self._mailbox.rank}:
                self._peers.lose(peer, "the world was shut down without waiting for this worker any longer")

    def _closes(self, peer: int) -> None:
        """Close, because a worker says so; pass the word on if the first one to say so may have died meanwhile."""
        self.gone(peer)
        if self._mailbox.survives and not self._told_to_close.is_set():
            self._told_to_close.set()
            self._tell_all(Kind.CLOSE)
        self._told_to_close.set()

    def gone(self, peer: int) -> None:
        self._gone.add(peer)

    def _all_gone(self) -> bool:
        return self._gone | self._peers.lost.keys() | {self._mailbox.rank} >= set(range(self._mailbox.size))

    def lose(self, peer: int) -> None:
        """Do without a lost worker's reports."""
        if self._mailbox.survives:
            self._survey.leave_out(peer)
            if self._survey.complete:
                self._round_complete.set()

    def _report(self) -> Report:
        try:
            self._releasing.flush()
        except errors.WireError as error:  # who conducts the end waits for this report
            log.error("%s: what was dropped before the end was not told: %s", self._mailbox.info, error)
        lost = tuple(sorted(self._peers.lost))
        sent, received, serving = self._mailbox.work.counts(lost)
        busy = bool(serving or len(self._caller) or self._losses.busy())
        shown = self._being_served.shown() + self._callbacks_shown()
        return Report(self._wants_to_close, busy, sent, received, shown, lost)

    def _callbacks_shown(self) -> tuple[Serving, ...]:
        """Return the callbacks that run here, as calls that those who have answered, or are lost, have made."""
        now = time.monotonic()
        texts = {CALL: "the callbacks of {}", ON_LOST: "{} (on_lost)"}
        return tuple(
            Serving(texts[one.of].format(described(one.function)), one.peer, now - one.since)
            for one in self._callbacks.now()
        )

    def awaited(self) -> set[int]:
        """Return the ranks of the workers whose silence would keep this worker from closing."""
        if not self._wants_to_close or self._told_to_close.is_set():
            return set()
        return {self.conductor} if self._mailbox.rank != self.conductor else set(range(self._mailbox.size))
