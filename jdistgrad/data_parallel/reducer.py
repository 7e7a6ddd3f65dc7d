"""A rank's collective operations: agree on a plan, average its buckets, shadow other ranks' steps.

Every method runs on the communication thread and begins with a roll call of all ranks.
"""

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from jdistgrad.collectives import roll_call
from jdistgrad.collectives.descriptions import is_sparse
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.collectives.roll_call import Act, Joining, Roll, RollCall
from jdistgrad.data_parallel import averages
from jdistgrad.data_parallel.agreement import (
    BucketPlan,
    Handling,
    Rules,
    Terms,
    require_agreement,
    require_same_bits,
    require_same_parameters,
)
from jdistgrad.data_parallel.buckets import Bucket
from jdistgrad.data_parallel.statistics import BucketTimes
from jdistgrad.errors import CollectiveError, DisagreementError, MissingRanksError, NonFiniteError, WorkerLostError
from jdistgrad.rpc.meetings import Meeting

F = TypeVar("F", bound=Callable[..., Any])


class UnfinishedError(WorkerLostError):
    """An operation is incomplete because a rank has died. The others have a new group, and may repeat the operation."""


def whole(method: F) -> F:
    """Make a method of a reducer an operation that is repeated on every rank if a rank dies meanwhile."""

    @functools.wraps(method)
    def run(reducer: Any, *args: Any) -> Any:
        while True:
            error, found, before = None, None, reducer.step
            try:
                found = method(reducer, *args)
            except Exception as failure:
                error = failure
            if not reducer.vote(error):
                reducer.step = before
            elif error is not None:
                raise error
            else:
                return found

    return run  # type: ignore[return-value]


class Reducer:
    """A rank's part in the reductions of a group."""

    def __init__(self, collectives: HostCollectives, rules: Rules):
        self.collectives, self.rules = collectives, rules
        self.plans: dict[int, BucketPlan] = {}
        self.states: dict[int, dict[int, Any]] = {}
        self.joining = Joining.NONE  # the kind of ``join`` block that this rank is in
        self.step = 0
        self.last_active: tuple[int, ...] = (0,)
        self.broken: CollectiveError | WorkerLostError | None = None
        self.announced: list[Meeting] = []  # this rank's failures, whose meetings are not read yet
        self.failed = 0  # the last step that this rank has announced as failed
        self._voted_on = ""  # the last failure of other ranks that the ranks have voted on
        self._scratch = averages.scratch()

    # Meeting.

    def _meet(self, mine: Roll, terms: Terms | None = None) -> RollCall:
        """Hold a roll call. ``terms``: describe this rank's tree, for the error if trees differ."""
        with self._breaking():
            while self.announced:
                roll_call.read_words(self.announced.pop(0).wait(self.rules.timeout))
            words = self._announce(mine).wait(self.rules.timeout)
        try:
            self._require_same_terms(words, terms)
        except DisagreementError:
            self.step = max(roll_call.unpack(word).step for word in words)  # equal on all ranks, which may continue
            raise
        with self._breaking():
            call = roll_call.read_words(words)
        self.last_active = call.active or self.last_active
        return call

    def _announce(self, mine: Roll) -> Meeting:
        return self.collectives.members.begin(mine.pack(), f"rank {self.collectives.rank} {mine}")

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Make all later meetings fail once ranks diverged or were missing: reductions would no longer match."""
        if self.broken is not None:
            raise copy.copy(self.broken)
        try:
            yield
        except (DisagreementError, MissingRanksError, WorkerLostError) as error:
            self.broken = copy.copy(error)  # without the traceback, whose frames may refer to this object
            raise

    @contextlib.contextmanager
    def announcing(self, step: int, bucket: int) -> Iterator[None]:
        """Open a block; announce this rank's failure in it to the others, which would wait."""
        try:
            with self._breaking():
                yield
        except BaseException:
            if self.broken is None:
                self.fail(step, bucket)
            raise

    def enter(self, kind: Joining) -> Joining:
        """Enter a kind of ``join`` block, or leave it; return the kind before."""
        before, self.joining = self.joining, kind
        if self.collectives.survives:
            self.collectives.voting = self.votes
        return before

    # Continuing without ranks that die.

    @property
    def votes(self) -> bool:
        """Return whether the ranks vote after each operation. In ``join`` blocks they shadow each other instead."""
        return self.collectives.survives and self.joining is Joining.NONE

    def vote(self, error: BaseException | None) -> bool:
        """Return whether every rank has completed an operation; if not, leave out the lost ranks. A collective.

        Arguments:
          error: the operation's error on this rank.
        """
        group: Any = self.collectives
        if group.survives and isinstance(error, CollectiveError | NonFiniteError):
            group.explain(error)
        if not self.votes:
            return True
        failed = frozenset[int]()  # the other ranks whose failure has ended this operation; each is voted on once
        if isinstance(error, DisagreementError) and group.rank not in error.failed and str(error) != self._voted_on:
            self._voted_on, failed = str(error), error.failed
        if isinstance(self.broken, CollectiveError) and not failed:
            return True
        try:
            if group.vote(whole=not isinstance(error, WorkerLostError) and not group.has_lost_after(failed)):
                return True
            self.collectives = group.without_lost()
        except (WorkerLostError, MissingRanksError) as failure:
            self.broken = CollectiveError(f"these steps cannot continue: {failure}")
            raise
        self.broken, self.failed = None, 0
        self.announced.clear()
        return False

    def abandon(self, step: int, bucket: int) -> None:
        """Announce a failure of this rank alone; if a rank is lost, again in the new group."""
        error = None
        try:
            self.fail(step, bucket)
        except WorkerLostError as lost:
            error = lost
        if not self.vote(error):
            self.abandon(step, bucket)

    def fail(self, step: int, bucket: int) -> None:
        """Announce, once, that this rank's step has failed, without waiting for the other ranks."""
        if step > self.failed:
            self.failed = step
            self.announced.append(self._announce(Roll(Act.FAILED, step, bucket, 0, 0)))

    def _require_same_terms(self, words: Sequence[bytes], mine: Terms | None) -> None:
        """Raise on every rank, before anything is reduced, if the ranks' trees differ."""
        active = {r: roll for r, roll in enumerate(map(roll_call.unpack, words)) if roll.act is not Act.SHADOW}
        begin = all(roll.act in (Act.AGREE, Act.REDUCE, Act.AVERAGE) and roll.number == 0 for roll in active.values())
        comparable = begin or len({(roll.act, roll.number) for roll in active.values()}) == 1
        if not comparable or len({roll.digest for roll in active.values()}) <= 1:
            return
        terms = self.collectives.gather_objects(mine)
        require_agreement({rank: terms[rank] for rank in active})

    def _roll(self, act: Act, number: int = 0, digest: int = 0) -> Roll:
        """Return the roll of an action without ``Handling``."""
        return Roll(act, self.step, number, 0, digest, self.joining)

    # The operations.

    @whole
    def agree(self, terms: Terms, order: Sequence[int] | None, digests: Sequence[bytes] | None) -> BucketPlan:
        """Agree on the plan for a new tree. Raise DisagreementError if other ranks differ.

        Arguments:
          digests: of the parameters, which must be equal on all ranks; None: do not compare parameters.
        """
        return self._share_plan(self._meet(self._roll(Act.AGREE, digest=terms.digest()), terms), terms, order, digests)

    def _share_plan(
        self, call: RollCall, terms: Terms | None, order: Sequence[int] | None, digests: Sequence[bytes] | None = None
    ) -> BucketPlan:
        """Make the plan from the lowest active rank's tree and order, which joined ranks get here, too.

        Raises:
          DisagreementError: a rank's settings or parameters differ.
        """
        assert call.leader is not None
        leads = call.leader == self.collectives.rank
        gathered = self.collectives.gather_objects((self.rules.settings, (terms, order) if leads else None, digests))
        terms, order = gathered[call.leader][1]
        assert terms is not None
        require_agreement({rank: terms._replace(settings=settings) for rank, (settings, *_) in enumerate(gathered)})
        require_same_parameters(
            terms.leaves, {rank: each for rank, (*_, each) in enumerate(gathered) if each is not None}
        )
        plan = self.rules.plan(terms, order)
        self.plans[plan.digest] = plan
        return plan

    def meet(self, plan: BucketPlan, handling: Handling, program: int = 0) -> bool:
        """Meet before a program that reduces all buckets of a plan; return whether all ranks have the same program.

        Arguments:
          program: the digest of this rank's program.
        """
        mine = Roll(handling.act, handling.step, 0, program, plan.digest, handling.joining)
        return len({roll.fault for roll in self._meet(mine, plan.terms).rolls}) == 1

    def average(
        self, plan: BucketPlan, number: int, gradients: Sequence[Any], handling: Handling, *, overwrite: bool
    ) -> list[Any]:
        """Average a bucket. ``overwrite``: averages may be written over the gradients."""
        bucket = plan.buckets[number]
        with self.announcing(handling.step, number):
            own = jax.block_until_ready(list(gradients))
            ready = time.perf_counter()
            fault = averages.first_not_finite(own) if self.rules.check_finite else 0
        mine = Roll(handling.act, handling.step, number, fault, plan.digest, handling.joining)
        call = self._meet(mine, plan.terms)
        self.require_finite(bucket, [roll.fault for roll in call.rolls])
        met = time.perf_counter()
        with self.announcing(handling.step, number):
            averaged = self._averaged(bucket, own, handling, call.divisor, overwrite=overwrite)
        handling.spans.append(BucketTimes(number, ready, met, time.perf_counter()))
        return averaged

    def _averaged(
        self, bucket: Bucket, gradients: list[Any], handling: Handling, divisor: int, *, overwrite: bool
    ) -> list[Any]:
        if bucket.sparse:
            gradient, shape = gradients[0], bucket.slots[0].shape
            if is_sparse(gradient):
                return [averages.reduce_sparse(gradient, shape, bucket.dtype, divisor, self.collectives)]
            table = np.array(gradient, order="C")
            averages.reduce_rows(table, shape, divisor, self.collectives)
            return [jax.device_put(table, gradient.sharding)]
        if handling.hook is None:
            return averages.average_in_chunks(
                bucket, gradients, divisor, self.collectives, self._scratch, overwrite=overwrite
            )
        if bucket.index not in handling.states:
            handling.states[bucket.index] = handling.hook.init(bucket)
        averaged, handling.states[bucket.index] = averages.with_hook(
            handling.hook, bucket, gradients, handling.states[bucket.index], divisor, self.collectives
        )
        return averaged

    def default_handling(self, plan: BucketPlan, act: Act) -> Handling:
        """Return a step's handling by the hook of the rules, whose states are kept for each plan."""
        return Handling(self.step, self.rules.hook, self.states.setdefault(plan.digest, {}), act, self.joining)

    def require_finite(self, bucket: Bucket, faults: Sequence[int]) -> None:
        for rank, fault in enumerate(faults):
            if fault:
                slot = bucket.slots[fault - 1]
                raise NonFiniteError(
                    f"step {self.step}: the gradient of {slot.path} on rank {rank} holds NaN or infinity (bucket "
                    f"{bucket.index}); no rank has its average. Look at that rank's loss and inputs.",
                    rank=rank,
                    path=slot.path,
                )

    @whole
    def share_used(self, used: Sequence[bool]) -> np.ndarray:
        self._meet(self._roll(Act.USED, len(used)))
        by_any = np.array(used, np.uint8)
        self.collectives.run("allreduce", by_any, "max")
        return by_any.astype(bool)

    @whole
    def broadcast(self, terms: Terms, memories: list[np.ndarray], root: int) -> list[np.ndarray]:
        root = self.collectives.place_of(root)
        self._meet(self._roll(Act.BROADCAST, root, terms.digest()), terms)
        for memory in memories:
            self.collectives.run("broadcast", memory, root)
        return memories

    @whole
    def mean(self, tree: Any) -> Any:
        return self.collectives.allreduce(tree, "mean")

    @whole
    def verify(self, terms: Terms, memories: Sequence[np.ndarray]) -> None:
        self._meet(self._roll(Act.VERIFY, digest=terms.digest()), terms)
        require_same_bits(terms.leaves, memories, self.collectives.gather_objects)

    # Joining.

    def shadow(self) -> int:
        """Take part in the other ranks' operations, with zeros, until all have joined; return the last active rank.

        Shadowing continues after a bucket that is not finite: the others raise the error, and may continue.
        """
        handling: Handling | None = None
        while True:
            call = self._meet(self._roll(Act.SHADOW))
            if call.leader is None:
                self.enter(Joining.NONE)
                return self.collectives.rank_at(max(self.last_active))
            lead = call.rolls[call.leader]
            self.step = max(self.step, lead.step)
            if lead.act is Act.AGREE:
                self._share_plan(call, None, None)
            elif lead.act in (Act.REDUCE, Act.AVERAGE):
                with self.announcing(lead.step, lead.number):
                    plan = self.plans[lead.digest]
                    if handling is None or lead.number == 0:
                        handling = self.default_handling(plan, Act.REDUCE)
                        handling.remember()
                    self._shadow_bucket(plan, lead.number, call, handling)
            elif lead.act is Act.USED:
                self.collectives.run("allreduce", np.zeros(lead.number, np.uint8), "max")
            elif lead.act is not Act.FAILED:
                raise roll_call.disagreement(call.rolls, self.collectives.rank, call.leader)
            elif handling is not None and handling.step == self.step:  # the others raise the error, and may continue
                handling.put_back()

    def _shadow_bucket(self, plan: BucketPlan, number: int, call: RollCall, handling: Handling) -> None:
        bucket = plan.buckets[number]
        if any(roll.fault for roll in call.rolls):
            handling.put_back()
            return
        if plan.terms.leaves[bucket.slots[0].index].sparse:
            averages.reduce_sparse(None, bucket.slots[0].shape, bucket.dtype, call.divisor, self.collectives)
        else:
            nothing = [jax.numpy.zeros(slot.shape, bucket.dtype) for slot in bucket.slots]
            self._averaged(bucket, nothing, handling, call.divisor, overwrite=False)
