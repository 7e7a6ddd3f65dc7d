"""The workers that call ``save`` or ``restore`` together: they agree after each stage, so that all go on or none.

The first of them, the leader, asks owners and the other callers for their parts.
"""

import contextlib
import itertools
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import CheckpointError, DisagreementError, DistgradError, WorkerLostError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.failures import in_short
from jdistgrad.rpc.functions import Args
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving import desk
from jdistgrad.saving.marks import Leaf, PerWorker, leaves_of, require_different
from jdistgrad.saving.owners import Work, works_for

Asked = dict[int, list[Work]]  # by the rank of the worker that does it


_numbers = itertools.count()


class Plan(NamedTuple):
    """What a caller tells the others: its attempt's name, the places of its leaves, and what owners do, by owner."""

    attempt: str
    places: list[str]
    asked: Asked


class Job:
    """What one caller saves or restores, and with whom.

    Attributes:
      what: the call, for messages.
      attempt: the name of this worker's call at the desk.
      of_trees, leaves: the leaves of the trees; and those of the optimizers too.
      plans: those of all callers, by rank.
      callers: the ranks of those that call together; None as long as it is not known.
    """

    def __init__(self, what: str, trees: Any, optimizers: Any, workers: Sequence[int] | None):
        self.what, self.rank = what, current_worker().rank
        self.attempt = f"{self.rank}.{next(_numbers)}"
        self._trees, self.optimizers = trees, optimizers
        self.plans: dict[int, Plan] = {}
        self.callers = workers
        self.leader, self.leads, self._stage = -1, False, 0
        self.of_trees: list[Leaf] = []
        self.leaves: list[Leaf] = []

    def meet(self) -> None:
        """Wait for the other callers. Raises DisagreementError if they have different trees."""
        self.plans = self.agree(self._plan, everybody=True)
        self.callers = sorted(self.plans)
        self.leader = self.callers[0]
        self.leads = self.rank == self.leader
        expected = self.plans[self.leader].places
        for caller, found in self.plans.items():
            if expected != found.places:
                place = next(iter(set(expected) ^ set(found.places)), "the order")
                has = f"worker {self.leader if place in expected else caller} has {place}, the other has not"
                raise DisagreementError(f"{self.what}: workers {self.leader} and {caller} have different trees: {has}")

    def _plan(self) -> Plan:
        """Take everything apart, and keep the leaves for the calls that will ask for them."""
        self.of_trees = list(leaves_of(self._trees, "trees"))
        self.leaves = [*self.of_trees, *leaves_of(self.optimizers, "optimizers")]
        require_different(leaf.place for leaf in self.leaves)
        current_worker().kept[self.attempt] = self.leaves
        asked: Asked = {}
        for leaf in self.leaves:
            for rank, work in works_for(leaf, self.rank):
                asked.setdefault(rank, []).append(work)
        return Plan(self.attempt, [leaf.place for leaf in self.leaves], asked)

    def agree(self, act: Callable[[], Any], *, everybody: bool = False) -> Any:
        """Act, and return the result when all callers have acted; or everybody's results, by rank.

        If one of the callers fails, all raise its error.
        """
        error, failure, result = None, None, None
        try:
            result = act()
        except Exception as failed:
            text = str(failed) if isinstance(failed, DistgradError) else in_short(failed)
            error, failure = failed, _of_kind(failed, _naming(current_worker().info, text))
        seconds = math.inf if self.plans else desk.SECONDS
        said = failure, result if everybody else None
        self._stage += 1  # in the name, since the desk may move between two stages
        what = f"{self.what}, part {self._stage}" if self.plans else self.what
        told = desk.meet(what, self.attempt, said, self.callers, seconds)
        if error is not None:
            raise error
        for failure, _ in told.values():
            if failure is not None:
                raise failure
        return {rank: one for rank, (_, one) in told.items()} if everybody else result


def call_each(
    function: Callable[..., Any], arguments: Sequence[tuple[int, Args]]
) -> tuple[list[Any], tuple[WorkerInfo, BaseException] | None]:
    """Call a function on workers, by rank, each with its own arguments; return the results, and the first failure.

    Waits for all, also if some fail: none writes any more then.
    """
    workers, asked = current_worker().directory.workers, []
    failed: tuple[WorkerInfo, BaseException] | None = None
    for rank, args in arguments:
        try:
            asked.append((rank, api.rpc_async(rank, function, args, timeout=math.inf)))
        except DistgradError as error:
            failed = failed or (workers[rank], error)
    results = []
    for rank, future in asked:
        why = future.exception()
        if why is None:
            results.append(future.result())
        else:
            failed = failed or (workers[rank], why)
    return results, failed


def raise_failed(worker: WorkerInfo, failure: BaseException, what: str, then: str) -> NoReturn:
    """Raise what has failed on a worker: an error of a checkpoint in its own words, any other in these."""
    if isinstance(failure, CheckpointError):
        text = str(failure) if worker.rank == current_worker().rank else _naming(worker, str(failure))
        raise CheckpointError(text) from failure
    why = in_short(failure)
    if isinstance(failure, WorkerLostError) and failure.worker is not None:
        why = current_worker().peers.lost.get(failure.worker.rank, why)
    raise _of_kind(failure, f"{what}: {why}. {then}") from failure


def _of_kind(error: BaseException, text: str) -> DistgradError:
    """Return an error for all callers: of the loss of a worker, or of something else."""
    return WorkerLostError(text, worker=error.worker) if isinstance(error, WorkerLostError) else CheckpointError(text)


def _naming(worker: WorkerInfo, text: str) -> str:
    """Return the text of a worker's error with the worker's name, unless it names one."""
    is_named = any(str(one) in text for one in current_worker().directory.workers)
    return text if is_named else f"{worker}: {text}"


@contextlib.contextmanager
def together(
    what: str, folder: pathlib.Path, trees: Any, optimizers: Any, workers: Sequence[int] | None
) -> Iterator[Job]:
    """Wait for the others that call this, and open a block in which they do it together."""
    if not trace_state_clean():
        raise CheckpointError(f"{what} inside a transformation of JAX's would run while it is traced: call it outside")
    marked = optimizers.tree if isinstance(optimizers, PerWorker) else optimizers
    for leaf in jax.tree.leaves(marked, is_leaf=lambda node: isinstance(node, DistributedOptimizer | PerWorker)):
        if not isinstance(leaf, DistributedOptimizer | PerWorker):
            raise TypeError(
                f"{what}: optimizers are DistributedOptimizers, not {leaf!r:.60}. The state of an optax transformation "
                "belongs to trees: (params, state)."
            )
    me = current_worker()
    chosen = None if workers is None else sorted({int(rank) for rank in workers})
    if chosen is not None and me.rank not in chosen:
        raise CheckpointError(f"{what} on {me.info}: workers={chosen} does not name this worker")
    if chosen is not None:  # other workers may do the same at the same time, in meetings of their own
        what = f"{what} with workers={chosen}"
    job, why = Job(what, trees, optimizers, chosen), None
    # The desk takes two calls of one worker for a disagreement, so a call waits for that of another thread.
    alone: threading.Lock = me.kept.setdefault(f"saves in {folder}", threading.Lock())
    with alone, within(None):  # the calls belong to no context that may be open
        try:
            job.meet()
            yield job
        except BaseException as error:
            if not isinstance(error, DistgradError):  # which the others know
                name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
                why = f"{what}: {name} has ended it on {me.info}. Call it again on every worker."
            raise
        finally:
            me.kept.pop(job.attempt, None)
            desk.leave(job.attempt, why)
