"""The desk at which those that save or restore together find each other.

A program in which all ranks do the same, and one in which worker 0 drives and the others serve, call ``save`` in the
same way: those that have called ``shutdown`` only serve, and all others are waited for. All come to the desk of one
worker, the first that is not lost, and are told who has come. From then on they are a group of their own.

A desk's worker may die when it has told only some of a party. The others come to the next desk. Each that comes there,
or is awaited there, says whom it has met last, so that the others are told the same.
"""

import functools
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from jdistgrad.collectives.world import TOLD_SECONDS
from jdistgrad.errors import DisagreementError, MissingRanksError, WorkerLostError
from jdistgrad.rpc import api
from jdistgrad.rpc.functions import shown_as
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
SECONDS = 300.0  # as long as a barrier waits
MET = "whom this worker has met last to save or restore"

Company = dict[int, int]  # those that have met: the number of each one's call, by rank


class Party:
    """Those that come to the desk for the same thing.

    Attributes:
      workers: the ranks of those that must come; None: all that do not merely serve.
      came: those that have.
      end: is done when all have come, or will not.
    """

    def __init__(self, what: str, workers: Sequence[int] | None):
        self.what, self.workers = what, workers
        self.came: Company = {}
        self.bell, self.end = threading.Event(), Future[Company]()
        self.end.add_done_callback(lambda _: self.bell.set())

    @property
    def missing(self) -> set[int]:
        """The ranks of the workers that have not come; of those, some may merely serve, or be lost if named."""
        return set(_living() if self.workers is None else self.workers) - self.came.keys()


class Desk:
    """The parties of which not all have come, and who has still to be told of one that failed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: dict[str, Party] = {}  # by what they are for
        self._met: dict[int, Company] = {}  # whom each worker has met last, by its rank
        self._owed: dict[int, tuple[set[int], Exception]] = {}  # by rank: who was there, and what they were told

    def arrive(
        self, what: str, rank: int, call: int, workers: Sequence[int] | None, met: Company
    ) -> tuple[Party, bool]:
        """Let a worker come; return its party, and whether it is the first there.

        Workers that are missing here may wait in another party for some of these: then both parties fail.

        Raises:
          Exception: that of a party which has failed without this worker, unless the others have come again: otherwise
            the worker might hold a party without them.
        """
        with self._lock:
            party, (were_there, why) = self._open.get(what), self._owed.pop(rank, (set(), None))
            if party is None:
                party = Party(what, workers)
                if why is not None and were_there & party.missing:
                    raise why
                self._open[what] = party
            first = not party.came
            party.came[rank] = call
            party.bell.set()
            self.note(rank, met)
            there = [one for one in self._open.values() if one.came.keys() & party.missing]
            apart = [one for one in there if one.missing & party.came.keys()]
            if apart and not party.end.done():
                other = f"worker {min(apart[0].came.keys() & party.missing)} in {apart[0].what}"
                text = f"workers {sorted(party.came)} are in {what}, {other}. They must make the same calls."
                self.fail([party, *apart], DisagreementError(text))
            return party, first

    def note(self, rank: int, met: Company) -> None:
        """Note whom a worker has met last. A party of which some have met already, at a former desk, ends as it did."""
        with self._lock:
            self._met[rank] = met
            for party in list(self._open.values()):
                for company in self._met.values():
                    if company.items() & party.came.items():
                        self._end(party, company)

    def _end(self, party: Party, met: Company | None = None) -> None:
        """Tell a party who has come: all by now, or those who have met at a former desk."""
        with self._lock:
            if not party.end.done():
                del self._open[party.what]
                party.end.set_result(met or dict(sorted(party.came.items())))

    def fail(self, parties: Sequence[Party], error: Exception) -> None:
        """Let parties fail, unless they have ended; of those that have not come, note that they are to be told."""
        with self._lock:
            here = {rank for one in parties for rank in one.came}
            for one in parties:
                if not one.end.done():
                    self._owed |= dict.fromkeys(one.missing - here, (here, error))
                    del self._open[one.what]
                    one.end.set_exception(error)

    def hold(self, party: Party) -> None:
        """Wait until everybody has come who has to, or the party has failed, and let those that are there go on."""
        until, pause = time.monotonic() + SECONDS, FIRST_PAUSE
        try:
            while not party.end.done() and (missing := self._awaited(party)):
                if time.monotonic() > until:
                    raise MissingRanksError(
                        f"{party.what}: {_names(missing)} did not come within {SECONDS:g} s. Every worker that has not "
                        "called shutdown() calls it too, with the same step; for some workers only, name them on each "
                        "of them: workers=[...].",
                        missing=sorted(missing),
                    )
                party.bell.wait(pause)
                party.bell.clear()
                pause = min(2 * pause, LONGEST_PAUSE)
            self._end(party)
        except Exception as error:
            self.fail([party], error)

    def _awaited(self, party: Party) -> set[int]:
        """Ask those that are missing where they are; return those that may come."""
        me = current_worker()
        try:
            serving = self._serving(party.missing)
        except WorkerLostError:
            if party.workers is None and me.survives:
                return party.missing  # without the lost one
            raise
        missing = party.missing
        if party.workers is None:
            return missing - serving
        gone = missing & serving
        # Somebody may have come from a call that is served in ``shutdown``: others may be called, too.
        if gone and not self._serving(list(party.came)):
            text = f"{party.what}: {_names(gone)} will not come: shutdown() was called there"
            raise MissingRanksError(text, missing=sorted(gone))
        return missing

    def _serving(self, ranks: Iterable[int]) -> set[int]:
        """Ask workers; return the ranks of those that only serve."""
        answers = {rank: api.rpc_async(rank, presence, timeout=SECONDS) for rank in ranks}
        found = {rank: answer.result() for rank, answer in answers.items()}
        for rank, (_, met) in found.items():
            self.note(rank, met)
        return {rank for rank, (only_serves, _) in found.items() if only_serves}


@shown_as("a meeting of workers")
def presence() -> tuple[bool, Company]:
    """Return whether this worker has called ``shutdown``, and only serves until all have; and whom it has met last."""
    me = current_worker()
    return me.closing.wanted, me.kept.get(MET, {})


@shown_as("a meeting of workers")
def _arrived(what: str, rank: int, call: int, workers: Sequence[int] | None, met: Company) -> Future[Company]:
    desk: Desk = current_worker().kept.setdefault("checkpoints' desk", Desk())
    party, first = desk.arrive(what, rank, call, workers, met)
    if first:
        desk.hold(party)
    return party.end


def meet(what: str, call: int, workers: Sequence[int] | None = None) -> Company:
    """Wait for the other workers that call the same; return who has come.

    Arguments:
      what: what they call, the same on all of them.
      call: the number of this worker's call, which is not repeated.
      workers: the ranks of those that come; None: all that have not called ``shutdown``, and are not lost.

    Raises:
      WorkerLostError: some worker is lost that has to come, or gives no sign of life.
      MissingRanksError: some worker neither came nor called ``shutdown``.
      DisagreementError: some worker calls something else.
    """
    me = current_worker()
    if workers is not None and set(workers) == {me.rank}:
        return {me.rank: call}
    entry, answer = CollectiveEntry(what, what, 0, by_calls=True), None
    while True:
        at = _living()[0]
        try:
            with WatchedBlock(me, entry, _living() if workers is None else workers, goes_on=True):
                args = what, me.rank, call, workers, me.kept.get(MET, {})
                answer = me.rpc_async(at, _arrived, args, {}, math.inf)
                me.kept[MET] = found = answer.result()
                return found
        except KeyboardInterrupt:
            if answer is not None:
                answer.add_done_callback(functools.partial(_leave, me, call))
            raise
        except WorkerLostError as error:
            is_lost = functools.partial(me.peers.lost.__contains__, at)  # another thread is about to find out
            if not (me.survives and error.worker == me.directory.workers[at] and poll(is_lost, TOLD_SECONDS)):
                raise


def _leave(worker: Worker, call: int, answer: Future[Company]) -> None:
    """Leave the group of a call that Ctrl-C has ended, as soon as there is one: its members wait for this worker."""
    if answer.exception() is None and answer.result().get(worker.rank) == call:
        group_of(worker, answer.result()).leave("KeyboardInterrupt")


def group_of(worker: Worker, company: Company) -> Members:
    """Return the group of those that have met, which is another one for each call."""
    return Members(worker, list(company), tuple(company.items()), by_calls=True)


def _living() -> list[int]:
    """Return the ranks of the workers that are not lost."""
    worker = current_worker()
    return [rank for rank in range(worker.size) if rank not in worker.peers.lost]


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in sorted(ranks))
