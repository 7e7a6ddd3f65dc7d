"""The workers that call ``save`` or ``restore`` together: they agree after each stage, so that all go on or none.

The first of them, the leader, asks owners and the other callers for their parts.
"""

import contextlib
import itertools
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import CheckpointError, DisagreementError, DistgradError, MissingRanksError, WorkerLostError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.functions import Args
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving.desk import Company, group_of, meet
from jdistgrad.saving.marks import leaves_of
from jdistgrad.saving.owners import Plan, outline, planned

_numbers = itertools.count()


class Job:
    """What one caller saves or restores, and with whom.

    Attributes:
      what: the call, for messages.
      plan: that of this caller, or what has kept it from having one.
      numbers: those of the calls, by the rank of the caller; ``callers``: the ranks.
      plans: those of all callers, by rank, without their leaves; only the leader knows them.
    """

    def __init__(self, what: str, plan: CallFuture[Plan], numbers: Company):
        self.what, self.plan, self.numbers, self.callers = what, plan, numbers, list(numbers)
        me = current_worker()
        self.group, self.leads = group_of(me, numbers), self.callers[0] == me.rank
        self.plans: Mapping[int, Plan] = {}

    def lead(self, act: Callable[[], Any]) -> Any:
        """Let the leader act, and return what it returns, on all callers."""
        return self.agree(lambda: act() if self.leads else None, told=True)[0]

    def agree(self, act: Callable[[], Any], *, told: bool = False) -> Any:
        """Act, and return the result when all callers have acted. If one of them fails, all raise its error.

        ``told``: whether to return everybody's results.
        """
        workers, error, result = current_worker().directory.workers, None, None
        try:
            if self.plan.result() and self.leads and not self.plans:
                self.plans = self._plans()
            result = act()
        except DistgradError as failed:
            error = failed
        except Exception as failed:
            error = CheckpointError(f"{self.what}: {in_short(failed)}")
            error.__cause__ = failed
        try:
            words = self.group.begin((error, result if told else None), self.what).wait(math.inf)
        except DistgradError as ended:
            if error is not None:
                raise error from error.__cause__
            if isinstance(ended, MissingRanksError):
                text = f"{self.what}: it was interrupted on {workers[self.callers[ended.missing[0]]]}."
                raise CheckpointError(f"{text} Call it again on every worker.") from ended
            raise
        for rank, (failure, _) in zip(self.callers, words, strict=True):
            if error is not None or failure is not None:
                raise error or _told(failure, workers[rank], str(failure))
        return [word for _, word in words] if told else result

    def _plans(self) -> dict[int, Plan]:
        """Ask all callers for their plans. Raises DisagreementError if they have different trees."""
        arguments = {rank: (number,) for rank, number in self.numbers.items()}
        plans = ask_each(outline, arguments, self.what, "take part", "Call it again on every worker.")
        leader, expected = self.callers[0], self.plan.result().places
        for caller, plan in plans.items():
            if expected != plan.places:
                place = next(iter(set(expected) ^ set(plan.places)), "the order")
                has = f"worker {leader if place in expected else caller} has {place}, the other has not"
                raise DisagreementError(f"{self.what}: workers {leader} and {caller} have different trees: {has}")
        return plans


def ask_each(
    function: Callable[..., Any], arguments: Mapping[int, Args], what: str, do: str, left: str, *, stays: bool = False
) -> dict[int, Any]:
    """Call a function on workers, each with its own arguments; return the results by rank.

    Waits for all, also if some fail: none writes any more then.

    Arguments:
      what, do, left: the call of users', what each worker has to do in it, and what there is if one cannot.
      stays: whether the results stay where they are; then references to them are returned.
    """
    asked: dict[int, Any] = {}
    failures = dict[int, BaseException]()
    for rank, args in arguments.items():
        try:
            asked[rank] = (api.remote if stays else api.rpc_async)(rank, function, args, timeout=math.inf)
        except DistgradError as error:
            failures[rank] = error
    answers = {rank: one.creation() if stays else one for rank, one in asked.items()}
    failures |= {rank: why for rank, one in answers.items() if (why := one.exception()) is not None}
    for rank, failure in failures.items():
        worker, text = current_worker().directory.workers[rank], str(failure)
        if not isinstance(failure, CheckpointError):  # which says it in its own words
            lost = failure.worker if isinstance(failure, WorkerLostError) else None
            why = current_worker().peers.lost.get(lost.rank) if lost is not None else None
            text = f"{what}: {worker} could not {do}: {why or in_short(failure)}. {left}"
        raise _told(failure, worker, text) from failure
    return asked if stays else {rank: one.result() for rank, one in asked.items()}


def _told(failure: BaseException, worker: WorkerInfo, text: str) -> DistgradError:
    """Return the error for other workers of what has failed on one, which it names."""
    me = current_worker()
    if worker != me.info and not any(str(one) in text for one in me.directory.workers):
        text = f"{worker}: {text}"
    if isinstance(failure, WorkerLostError):
        return WorkerLostError(text, worker=failure.worker)
    return DisagreementError(text) if isinstance(failure, DisagreementError) else CheckpointError(text)


@contextlib.contextmanager
def together(
    what: str, folder: pathlib.Path, trees: Any, optimizers: Any, workers: Sequence[int] | None
) -> Iterator[Job]:
    """Wait for the others that call this, and open a block in which they do it together."""
    if not trace_state_clean():
        raise CheckpointError(f"{what} inside a transformation of JAX's would run while it is traced: call it outside")
    for leaf in leaves_of(optimizers, "optimizers"):
        if not isinstance(leaf.value, DistributedOptimizer):
            raise TypeError(
                f"{what}: optimizers are DistributedOptimizers, not {leaf.value!r:.60}. The state of an optax "
                "transformation belongs to trees: (params, state)."
            )
    me = current_worker()
    chosen = None if workers is None else sorted({int(rank) for rank in workers})
    if chosen is not None and me.rank not in chosen:
        raise CheckpointError(f"{what} on {me.info}: workers={chosen} does not name this worker")
    if chosen is not None:  # other workers may do the same at the same time, in meetings of their own
        what = f"{what} with workers={chosen}"
    number = next(_numbers)
    # The desk takes two calls of one worker for a disagreement, so a call waits for that of another thread.
    alone: threading.Lock = me.kept.setdefault(f"saves in {folder}", threading.Lock())
    with alone, within(None), planned(number, trees, optimizers) as plan:  # the calls belong to no context
        job = Job(what, plan, meet(what, number, chosen))
        try:
            yield job
        except KeyboardInterrupt:
            with contextlib.suppress(DistgradError):  # the world is closed, or broken
                job.group.leave("KeyboardInterrupt")
            raise
        finally:
            job.group.close()
