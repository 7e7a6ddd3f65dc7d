"""The end of a world, seen from one worker: serve until everybody wants to close and nothing is under way."""

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from jdistgrad import errors
from jdistgrad.rpc.members.termination import Report, Survey
from jdistgrad.rpc.members.waiting import Patience, describe
from jdistgrad.wire.ids import spell
from jdistgrad.wire.message import Kind, Message

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

COORDINATOR = 0
FIRST_PAUSE, LONGEST_PAUSE = 0.2e-3, 20e-3
LOOK_SECONDS = 0.05
SPEAK_SECONDS = 10.0
ASK_SECONDS = 2.0  # for reports where they are asked for to tell of them

log = logging.getLogger("jdistgrad.rpc")


class Closing:
    """Answers surveys from the start; ``run`` takes part in the end.

    Attributes:
      gave_up: in what words the latest ``run`` ran out of time, if it did.
    """

    def __init__(self, worker: "Worker"):
        self._worker = worker
        self._wants_to_close = False
        self._told_to_close = threading.Event()
        self._survey = Survey(worker.size)
        self._round = 0
        self._round_complete = threading.Event()
        self._patience = Patience(math.inf, 0.0)
        self.gave_up: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether this worker is in ``shutdown``."""
        return self._wants_to_close

    def run(self, timeout: float, *, speaks: bool = True) -> None:
        """Return when the world is quiet, and everybody returns now.

        Arguments:
          speaks: whether to say for what it waits, where that is long: as warnings of the logger ``jdistgrad.rpc``,
            which Python prints to stderr unless the program has other plans for them.

        Raises:
          CallTimeoutError: not quiet within ``timeout`` seconds; it says for whom it waited. The world goes on.
          WorkerLostError: a worker died before.
        """
        self._check(math.inf, timeout)
        now = time.monotonic()
        self.gave_up, self._patience = None, Patience(SPEAK_SECONDS if speaks else math.inf, now)
        deadline = now + timeout
        self._want_to_close(True)
        try:
            if self._worker.rank == COORDINATOR:
                self._conduct(deadline, timeout)
            self._wait(self._told_to_close, deadline, timeout)
        except errors.CallTimeoutError as error:
            self._want_to_close(False)
            self.gave_up = str(error)
            raise

    def _want_to_close(self, wanted: bool) -> None:
        self._wants_to_close = wanted
        self._worker.transport.serve_only(wanted)

    def _conduct(self, deadline: float, timeout: float) -> None:
        pause = FIRST_PAUSE
        while not self._survey_once(deadline, timeout):
            self._check(deadline, timeout)
            self._look_around()
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
        for peer in range(self._worker.size):
            try:
                self._worker.post(peer, Message(kind, self._worker.rank, self._round))
            except errors.WorkerLostError:
                self._check(math.inf, math.inf)  # knows why it has gone
                raise

    def _wait(self, event: threading.Event, deadline: float, timeout: float) -> None:
        while not event.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            self._check(deadline, timeout)
            self._look_around()

    # What it waits for.

    def _look_around(self) -> None:
        """Now and then: of all that are in shutdown, the lowest says for what they wait."""
        now, worker = time.monotonic(), self._worker
        if not self._patience.wants_to_look(now):
            return
        reports = self._reports()
        lowest = min((rank for rank, report in reports.items() if report.closing), default=None)
        if self._patience.ends(reports, now) and lowest == worker.rank:
            waited = self._patience.waited(now)
            log.warning("shutdown of %s: waiting %.0f s %s", worker.info, waited, self._describe(reports))

    def _reports(self) -> dict[int, Report]:
        """What is known of everybody. Who conducts has asked already."""
        if self._worker.rank != COORDINATOR:
            self._ask_everybody()
        end = time.monotonic() + ASK_SECONDS
        while not (self._told_to_close.is_set() or time.monotonic() > end):
            if self._round_complete.wait(LOOK_SECONDS):
                break
        return self._survey.known()

    def _describe(self, reports: dict[int, Report]) -> str:
        return describe(self._worker.directory.workers, reports)

    def _check(self, deadline: float, timeout: float) -> None:
        worker = self._worker
        if worker.failure is not None:
            raise worker.failure
        if worker.peers.lost:
            raise errors.WorkerLostError(f"shutdown of {worker.info}: " + "; ".join(worker.peers.lost.values()))
        if time.monotonic() >= deadline:
            raise self._too_late(timeout)

    def _too_late(self, timeout: float) -> errors.CallTimeoutError:
        return errors.CallTimeoutError(
            f"shutdown of {self._worker.info}: waited {timeout:g} s {self._describe(self._reports())}. "
            "Every worker must call shutdown(); shutdown(graceful=False) leaves without waiting.",
            seconds=timeout,
        )

    # On the transport's thread.

    def handle(self, message: Message) -> None:
        if message.kind is Kind.SURVEY:
            reply = Message(Kind.REPORT, self._worker.rank, message.id, self._report().plain())
            self._worker.post(message.source, reply)
        elif message.kind is Kind.REPORT and message.id == self._round:
            self._survey.add(message.source, Report.of(message.body))
            if self._survey.complete:
                self._round_complete.set()
        elif message.kind is Kind.CLOSE and self._wants_to_close:
            self._told_to_close.set()
        elif message.kind is Kind.CLOSE:  # it gave up waiting just as the others found everything quiet
            for peer in set(range(self._worker.size)) - {self._worker.rank}:
                self._worker.peers.lose(peer, "the world was shut down without waiting for this worker any longer")

    def _report(self) -> Report:
        self._worker.letting_go.flush()
        sent, received, serving = self._worker.traffic.counts()
        busy = bool(serving or len(self._worker.calls))
        return Report(self._wants_to_close, busy, sent, received, self._worker.serving.shown())

    def awaited(self) -> set[int]:
        """Whose silence would keep this worker from closing."""
        if not self._wants_to_close or self._told_to_close.is_set():
            return set()
        return {COORDINATOR} if self._worker.rank != COORDINATOR else set(range(self._worker.size))


def leftovers(worker: "Worker") -> list[str]:
    """What a worker still holds at its end, in words."""
    held = [f"{worker.info} still holds a reference to {spell(claim.id)}" for claim in worker.claims.held()]
    owned = [f"{worker.info} still owns {spell(identifier)}" for identifier in worker.owned.identifiers()]
    scopes = [f"{worker.info} still takes part in context {spell(scope)}" for scope in worker.scopes.identifiers()]
    return held + owned + scopes


def describe_leftovers(found: list[str]) -> str:
    return "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
