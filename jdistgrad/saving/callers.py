"""The workers that call ``save`` or ``restore`` together: they agree after each stage, so that all go on or none.

The first of them, the leader, asks owners and the other callers for their parts.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from jdistgrad._compat import trace_state_clean
from jdistgrad.errors import CheckpointError, DisagreementError, DistgradError, WorkerLostError
from jdistgrad.optim.distributed import DistributedOptimizer
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.directory import WorkerInfo
from jdistgrad.rpc.functions import Args
from jdistgrad.rpc.futures import CallFuture
from jdistgrad.rpc.serving.failures import in_short
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving.desk import Arrival
from jdistgrad.saving.marks import PerWorker
from jdistgrad.saving.places import Leaf, leaves_of, replaced, require_different
from jdistgrad.wire.interrupts import InterruptibleFuture, put_off_interrupt

_numbers = itertools.count()

LEFT = "checkpoints' callers that have left"

Ends = Callable[[dict[int, Any]], bool]


@dataclasses.dataclass
class Job:
    """What one caller saves or restores, and with whom.

    Attributes:
      what: the call, for messages.
      callers: the ranks of those that call together.
      held_as: the name under which this caller's leaves are kept for those who write them; another thread's job may
        have the same ``what``.
    """

    what: str
    trees: Any
    optimizers: Any
    callers: list[int]
    meetings: int = 0
    _arrival: Arrival | None = None  # at the last meeting
    _ends: Ends = lambda told: False

    def __post_init__(self) -> None:
        self.rank = current_worker().rank
        self.number, self.count = self.callers.index(self.rank), len(self.callers)
        self.leads, self.leader = self.number == 0, self.callers[0]
        self.held_as = f"held for {self.what}, {next(_numbers)}"

    def leaves(self) -> list[Leaf]:
        found = [*self.leaves_of_trees(), *leaves_of(self.optimizers, "optimizers", self.number, self.count)]
        require_different(leaf.place for leaf in found)
        return found

    def leaves_of_trees(self) -> list[Leaf]:
        return list(leaves_of(self.trees, "trees", self.number, self.count))

    def trees_of(self, found: Sequence[Any]) -> Any:
        """Return the trees without marks, with these leaves."""
        return replaced(self.trees, self.number, self.count, iter(found))

    def from_leader(self, ask: Callable[[], Any]) -> Any:
        """Return what the leader finds, on every caller. If that is None, the job has come to its end."""
        acting = ask if self.leads else lambda: None
        found = self.agree(acting, everybody=True, ends=lambda told: told[self.leader][1] is None)
        return found[self.leader]

    def agree(self, act: Callable[[], Any], *, everybody: bool = False, ends: Ends = lambda told: False) -> Any:
        """Act, and return the result when all callers have acted; or everybody's results, by rank.

        If one of the callers fails, all raise its error.

        Arguments:
          ends: whether the job has come to its end when all callers have said this.
        """
        error, result = None, None
        try:
            result = act()
        except Exception as failed:
            error = failed
        said = None if error is None else (_in_words(error), _lost_in(error)), result if everybody else None
        told = self._part(said, ends).wait()
        if error is not None:
            raise error
        for failure, _ in told.values():
            if failure is not None:
                raise _in_type(*failure)
        return {rank: one for rank, (_, one) in told.items()} if everybody else result

    def _part(self, said: Any, ends: Ends = lambda told: False) -> Arrival:
        """Return the arrival at the next meeting of the callers."""
        with put_off_interrupt():
            self.meetings += 1
            self._arrival = Arrival(f"{self.what}, part {self.meetings}", said, self.callers, float("inf"))
            self._ends = ends
            return self._arrival

    def leave(self, failure: str) -> None:
        """Say at the next part that this caller has left, unless the others know that it failed, or the job is over."""
        told = {} if self._arrival is None else self._arrival.wait(shown=False)
        if not self._ends(told) and all(failed is None for failed, _ in told.values()):
            self._part(((failure, None), None)).wait(shown=False)


def call_each(
    function: Callable[..., Any],
    arguments: Sequence[tuple[int, Args]],
    in_words: Callable[[WorkerInfo, str], str],
) -> list[Any]:
    """Call a function on workers, each with its own arguments; return the results. Waits for all, also if some fail.

    Arguments:
      arguments: the rank of a worker, and its arguments.
      in_words: returns the text of the error for a worker whose call failed, and the reason.

    Raises:
      CheckpointError: a call failed.
      WorkerLostError: it failed because a worker is lost.
    """
    futures, failures = dict[int, CallFuture[Any]](), dict[int, BaseException]()
    for number, (rank, args) in enumerate(arguments):
        try:
            futures[number] = api.rpc_async(rank, function, args, timeout=float("inf"))
        except DistgradError as error:
            failures[number] = error
    failures |= {number: why for number, future in futures.items() if (why := future.exception()) is not None}
    for number, failure in sorted(failures.items(), key=lambda one: one[0]):
        raise_failed(current_worker().directory.workers[arguments[number][0]], failure, in_words)
    return [future.result() for future in futures.values()]


def raise_failed(worker: WorkerInfo, failure: BaseException, in_words: Callable[[WorkerInfo, str], str]) -> NoReturn:
    """Raise what has failed on a worker: an error of a checkpoint in its own words, any other in these."""
    if isinstance(failure, CheckpointError):
        text = str(failure) if worker.rank == current_worker().rank else _naming(worker, str(failure))
        raise CheckpointError(text) from failure
    lost = _lost_in(failure)
    why = in_short(failure) if lost is None else current_worker().peers.lost.get(lost, in_short(failure))
    raise _in_type(in_words(worker, why), lost) from failure


def _in_words(error: Exception) -> str:
    """Return what the other callers are told of this one's error."""
    text = str(error) if isinstance(error, DistgradError) else in_short(error)
    return text if isinstance(error, DisagreementError) else _naming(current_worker().info, text)


def _naming(worker: WorkerInfo, text: str) -> str:
    """Return the text of a worker's error with the worker's name, unless it names one."""
    is_named = any(str(one) in text for one in current_worker().directory.workers)
    return text if is_named else f"{worker}: {text}"


def _lost_in(error: BaseException) -> int | None:
    """Return the rank of the worker of whose loss an error tells, if it does."""
    worker = error.worker if isinstance(error, WorkerLostError) else None
    return worker.rank if isinstance(worker, WorkerInfo) else None


def _in_type(text: str, lost: int | None) -> DistgradError:
    """Return the error with a text, which tells of the loss of a worker or of something else."""
    if lost is None:
        return CheckpointError(text)
    return WorkerLostError(text, worker=current_worker().directory.workers[lost])


@contextlib.contextmanager
def together(what: str, trees: Any, optimizers: Any, workers: Sequence[int] | None) -> Iterator[Job]:
    """Wait for the others that call this, and open a block in which they do it together."""
    if not trace_state_clean():
        raise CheckpointError(f"{what} inside a transformation of JAX's would run while it is traced: call it outside")
    _check_optimizers(what, optimizers)
    me = current_worker()
    chosen = None if workers is None else sorted({int(rank) for rank in workers})
    if chosen is not None and me.rank not in chosen:
        raise CheckpointError(f"{what} on {me.info}: workers={chosen} does not name this worker")
    if chosen is not None:  # other workers may do the same at the same time, in meetings of their own
        what = f"{what} with workers={chosen}"
    with within(None):  # the calls belong to no context that may be open
        first, job = _first_meeting(what, chosen), None
        try:
            job = Job(what, trees, optimizers, sorted(first.wait()))
            yield job
        except BaseException as error:
            _leave_beside(what, first, job, error)
            raise


class _Left:
    """What callers on this worker have left that signals have ended.

    Attributes:
      first: the meetings in which others may still be waited for, by name: the same call goes on with them.
      telling: done when the others have been told.
    """

    def __init__(self) -> None:
        self.first: dict[str, Arrival] = {}
        self.telling: set[concurrent.futures.Future[None]] = set()


def _left() -> _Left:
    left: _Left = current_worker().kept.setdefault(LEFT, _Left())
    return left


def _first_meeting(what: str, workers: Sequence[int] | None) -> Arrival:
    """Return the arrival at the meeting in which the callers come together, after the others have left the last one."""
    left = _left()
    known = left.first.pop(what, None)
    if known is not None:
        return known
    for one in list(left.telling):
        one.result()
    return Arrival(what, None, workers)


def _leave_beside(what: str, first: Arrival, job: Job | None, error: BaseException) -> None:
    """Tell the other callers of an error, on another thread: they may be busy, and a signal ends this one's wait.

    If some may not have come yet, the same call of this worker may come first.
    """
    worker = current_worker()
    if worker.closed or worker.failure is not None or (job is None and isinstance(error, DistgradError)):
        return  # the others know
    name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    failure = f"{what}: {name} has ended it on {worker.info}. Call it again on every worker."
    left, told = _left(), InterruptibleFuture[None]()

    def leave() -> None:
        try:
            callers = sorted(first.wait(shown=False))
            left.telling.add(told)  # before it is found out whether the same call has come first
            if job is not None or left.first.pop(what, None) is first:
                with within(None):
                    (job or Job(what, None, None, callers)).leave(failure)
        except DistgradError:  # the others are told of it, or lost
            left.first.pop(what, None)
        finally:
            left.telling.discard(told)
            told.set_result(None)

    with put_off_interrupt():
        if job is None:
            left.first[what] = first
        else:
            left.telling.add(told)
        worker.run(worker.work.counted(leave))


def _check_optimizers(what: str, optimizers: Any) -> None:
    if isinstance(optimizers, PerWorker):
        optimizers = optimizers.tree
    for leaf in jax.tree.leaves(optimizers, is_leaf=lambda node: isinstance(node, DistributedOptimizer | PerWorker)):
        if not isinstance(leaf, DistributedOptimizer | PerWorker):
            raise TypeError(
                f"{what}: optimizers are DistributedOptimizers, not {leaf!r:.60}. The state of an optax transformation "
                "belongs to trees: (params, state)."
            )
