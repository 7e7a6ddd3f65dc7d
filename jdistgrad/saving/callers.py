"""Workers that call ``save`` or ``restore`` together: they find each other, and agree after each stage.

A program in which all ranks do the same, and one in which worker 0 drives and the others serve, call ``save`` in the
same way: workers that have called ``shutdown`` only serve, and all others are waited for. All callers send a call to
one worker, the coordinator: the first that is not lost. Its answer says who has come. From then on they are a group.

The first caller, the leader, asks the owners of values for their parts.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jdistgrad._compat import trace_state_clean
from jdistgrad.collectives.world import TOLD_SECONDS
from jdistgrad.errors import CheckpointError, DisagreementError, DistgradError, MissingRanksError, WorkerLostError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.functions import Args, shown_as
from jdistgrad.rpc.futures import done_future
from jdistgrad.rpc.meetings import Members
from jdistgrad.rpc.watchdog import CollectiveEntry, WatchedBlock
from jdistgrad.rpc.worker import Worker, current_worker
from jdistgrad.saving.marks import leaves_of, require_different
from jdistgrad.saving.owners import Work, works_of
from jdistgrad.wire.polling import poll

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.2
SECONDS = 300.0  # as long as a barrier waits

Company = dict[int, int]  # the number of each caller's call, by rank

_numbers = itertools.count()


class Job:
    """A save or restore, on one caller.

    Attributes:
      what: the call, for messages.
      callers: their ranks.
      in_trees, leaves: the leaves of this caller's trees; with those of the optimizers.
      works: the owners' work for each caller, by its rank.
    """

    def __init__(self, what: str, company: Company, trees: Any, optimizers: Any):
        self.what, self.callers, self._trees, self._optimizers = what, list(company), trees, optimizers
        me = current_worker()
        self.group, self.leads = group_of(me, company), self.callers[0] == me.rank

    def compare(self) -> None:
        """Find this caller's leaves, and exchange their places. Raises DisagreementError if callers' trees differ."""
        plans = dict(zip(self.callers, self.agree_all(self._plan), strict=True))
        leader, (expected, _) = next(iter(plans.items()))
        for caller, (places, _) in plans.items():
            if expected != places:
                place = next(iter(set(expected) ^ set(places)), "the order")
                has = f"worker {leader if place in expected else caller} has {place}, the other has not"
                raise DisagreementError(f"{self.what}: workers {leader} and {caller} have different trees: {has}")
        self.places, self.works = expected, {caller: works for caller, (_, works) in plans.items()}

    def _plan(self) -> tuple[list[str], list[Work]]:
        self.in_trees = list(leaves_of(self._trees, "trees"))
        self.leaves = [*self.in_trees, *leaves_of(self._optimizers, "optimizers")]
        places = [leaf.place for leaf in self.leaves]
        require_different(places)
        return places, [work for leaf in self.leaves for work in works_of(leaf)]

    def lead(self, act: Callable[[], Any]) -> Any:
        """Let the leader act; return its result on all callers."""
        return self.agree_all(lambda: act() if self.leads else None)[0]

    def agree(self, act: Callable[[], Any]) -> Any:
        """Act, and return the result when all callers have acted."""
        kept: list[Any] = []
        self.agree_all(lambda: kept.append(act()))
        return kept[0]

    def agree_all(self, act: Callable[[], Any]) -> list[Any]:
        """Act, and return all callers' results. If one caller fails, all raise its error."""
        workers, error, result = current_worker().directory.workers, None, None
        try:
            result = act()
        except DistgradError as failed:
            error = failed
        except Exception as failed:
            error = CheckpointError(f"{self.what}: {in_short(failed)}")
            error.__cause__ = failed
        try:
            words = self.group.begin((error, result), self.what).wait(math.inf)
        except DistgradError as ended:
            if error is not None:
                raise error from error.__cause__
            if isinstance(ended, MissingRanksError):
                text = f"{self.what}: it was interrupted on {workers[self.callers[ended.missing[0]]]}."
                raise CheckpointError(f"{text} Call it again on every worker.") from ended
            raise
        for rank, (failure, _) in zip(self.callers, words, strict=True):
            if error is not None or failure is not None:
                raise error or _elsewhere(failure, rank, str(failure))
        return [word for _, word in words]


def ask_each(
    function: Callable[..., Any],
    arguments: Mapping[int, Args],
    what: str,
    do: str,
    left: str,
    *,
    own: Callable[[], Any] | None = None,
    stays: bool = False,
) -> dict[int, Any]:
    """Call a function on workers, each with its own arguments; return the results by rank.

    Waits for all, also if some fail: none writes any more then.

    Arguments:
      what, do, left: for the error: the user's call, what each worker has to do in it, and what remains if one cannot.
      own: what this worker does meanwhile, as if it had been called too.
      stays: whether to return references to the results.
    """
    me, asked = current_worker(), dict[int, Any]()
    failures = dict[int, BaseException]()
    for rank, args in arguments.items():
        try:
            asked[rank] = (api.remote if stays else api.rpc_async)(rank, function, args, timeout=math.inf)
        except DistgradError as error:
            failures[rank] = error
    if own is not None:
        asked[me.rank] = done_future(own)
    answers = {rank: one.creation() if stays else one for rank, one in asked.items()}
    failures |= {rank: why for rank, one in answers.items() if (why := one.exception()) is not None}
    for rank, failure in failures.items():
        text = str(failure)
        if not isinstance(failure, CheckpointError):  # whose text says all
            lost = failure.worker if isinstance(failure, WorkerLostError) else None
            why = me.peers.lost.get(lost.rank) if lost is not None else None
            text = f"{what}: {me.directory.workers[rank]} could not {do}: {why or in_short(failure)}. {left}"
        raise _elsewhere(failure, rank, text) from failure
    return asked if stays else {rank: one.result() for rank, one in asked.items()}


def _elsewhere(failure: BaseException, rank: int, text: str) -> DistgradError:
    """Return an error of another worker's, with its name in the text."""
    me = current_worker()
    if rank != me.rank and not any(str(one) in text for one in me.directory.workers):
        text = f"{me.directory.workers[rank]}: {text}"
    if isinstance(failure, WorkerLostError):
        return WorkerLostError(text, worker=failure.worker)
    return DisagreementError(text) if isinstance(failure, DisagreementError) else CheckpointError(text)


@contextlib.contextmanager
def together(
    what: str, folder: pathlib.Path, trees: Any, optimizers: Any, workers: Sequence[int] | None
) -> Iterator[Job]:
    """Wait for the other callers, and open a block in which they act together."""
    if not trace_state_clean():
        raise CheckpointError(f"{what} inside a transformation of JAX's would run while it is traced: call it outside")
    for leaf in leaves_of(optimizers, "optimizers"):
        if not isinstance(leaf.value, DistributedOptimizer):
            raise TypeError(
                f"{what}: optimizers are DistributedOptimizers, not {leaf.value!r:.60}. The state of an optax "
                "transformation belongs to trees: (params, state)."
            )
    me = current_worker()
    chosen = None if workers is None else tuple(sorted({int(rank) for rank in workers}))
    if chosen is not None and me.rank not in chosen:
        raise CheckpointError(f"{what} on {me.info}: workers={list(chosen)} does not name this worker")
    # Threads of one worker take turns: in a folder, and at the coordinator, which knows one call of each worker.
    in_folder: threading.Lock = me.kept.setdefault(f"saves in {folder}", threading.Lock())
    at_coordinator: threading.Lock = me.kept.setdefault(f"callers {chosen}", threading.Lock())
    with in_folder, within(None):  # the calls belong to no context
        with at_coordinator:
            company = meet(what, next(_numbers), chosen)
        job = Job(what, company, trees, optimizers)
        try:
            job.compare()
            yield job
        except KeyboardInterrupt:
            with contextlib.suppress(DistgradError):  # the world is closed, or broken
                job.group.leave("KeyboardInterrupt")
            raise
        finally:
            job.group.close()


# How callers find each other.


def meet(what: str, call: int, workers: tuple[int, ...] | None = None) -> Company:
    """Wait for the other callers; return who has come.

    Arguments:
      what: the user's call, the same on all workers.
      call: the number of this worker's call, which is not repeated.
      workers: the ranks of the callers; None: all that have not called ``shutdown``, and are not lost.

    Raises:
      WorkerLostError: a caller is lost, or gives no sign of life.
      MissingRanksError: a worker neither came nor called ``shutdown``.
      DisagreementError: a worker calls something else.
    """
    me = current_worker()
    if workers == (me.rank,):
        return {me.rank: call}
    entry, answer = CollectiveEntry(what, what, 0, by_calls=True), None
    while True:
        at = _living()[0]
        try:
            with WatchedBlock(me, entry, _living() if workers is None else workers, goes_on=True):
                answer = me.rpc_async(at, _arrive, (what, me.rank, call, workers), {}, math.inf)
                return answer.result()
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
    """Return the group of the callers, which is another one for each call."""
    return Members(worker, list(company), tuple(company.items()), by_calls=True)


@dataclasses.dataclass(eq=False)
class Party:
    """The callers that have come to the coordinator, of those with the same ``workers=``.

    Attributes:
      came: by rank: the number of its call, and what it calls.
      changed: set when one has come; ``end``: done when all have, or will not.
    """

    came: dict[int, tuple[int, str]] = dataclasses.field(default_factory=dict)
    changed: threading.Event = dataclasses.field(default_factory=threading.Event)
    end: Future[Company] = dataclasses.field(default_factory=Future)


@shown_as("a meeting of workers")
def _arrive(what: str, rank: int, call: int, workers: tuple[int, ...] | None) -> Future[Company]:
    """Note on the coordinator that a worker has come; the first one's call waits here for the others."""
    lock: threading.Lock
    parties: dict[Any, Party]
    lock, parties = current_worker().kept.setdefault("callers of save and restore", (threading.Lock(), {}))
    with lock:
        party = parties.setdefault(workers, Party())
        is_first = not party.came
        party.came[rank] = call, what
        party.changed.set()
    if is_first:
        try:
            _wait_for_others(party, workers, what)
        except Exception as error:
            party.end.set_exception(error)
        with lock:
            del parties[workers]
            came = dict(sorted(party.came.items()))
        if not party.end.done():
            _end(party, came)
    return party.end


def _end(party: Party, came: Mapping[int, tuple[int, str]]) -> None:
    (first, (_, what)), *_ = came.items()
    for rank, (_, other) in came.items():
        if other != what:
            text = f"worker {first} is in {what}, worker {rank} in {other}. They must make the same calls."
            return party.end.set_exception(DisagreementError(text))
    return party.end.set_result({rank: call for rank, (call, _) in came.items()})


def _wait_for_others(party: Party, workers: tuple[int, ...] | None, what: str) -> None:
    until, pause = time.monotonic() + SECONDS, FIRST_PAUSE
    while missing := _missing(party, workers, what):
        if time.monotonic() > until:
            raise MissingRanksError(
                f"{what}: {_names(missing)} did not come within {SECONDS:g} s. Every worker that has not called "
                "shutdown() calls it too, with the same step; for some workers only, name them on each of them: "
                "workers=[...].",
                missing=sorted(missing),
            )
        party.changed.wait(pause)
        party.changed.clear()
        pause = min(2 * pause, LONGEST_PAUSE)


def _missing(party: Party, workers: tuple[int, ...] | None, what: str) -> set[int]:
    """Return the workers that have not come and may come."""
    missing = set(_living() if workers is None else workers) - party.came.keys()
    try:
        serving = _serving(missing)
    except WorkerLostError:
        if workers is None and current_worker().survives:
            return missing  # without the lost one, next time
        raise
    if workers is None:
        return missing - serving
    # Some may have come from a call that is served in ``shutdown``: others may be called, too.
    if (gone := missing & serving) and not _serving(list(party.came)):
        text = f"{what}: {_names(gone)} will not come: shutdown() was called there"
        raise MissingRanksError(text, missing=sorted(gone))
    return missing


def _serving(ranks: Iterable[int]) -> set[int]:
    """Return which workers have called ``shutdown``, and only serve until all have."""
    answers = {rank: api.rpc_async(rank, _only_serves, timeout=SECONDS) for rank in ranks}
    return {rank for rank, answer in answers.items() if answer.result()}


@shown_as("a meeting of workers")
def _only_serves() -> bool:
    return current_worker().closing.wanted


def _living() -> list[int]:
    worker = current_worker()
    return [rank for rank in range(worker.size) if rank not in worker.peers.lost]


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(str(current_worker().directory.workers[rank]) for rank in sorted(ranks))
