"""Steps called from Python: buckets are reduced while later segments of the backward pass run.

Each DataParallel has one communication thread, which reduces the buckets in one order.
"""

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad.collectives.descriptions import Leaf, index_dimensions
from jdistgrad.collectives.host import InTurn
from jdistgrad.collectives.roll_call import Act
from jdistgrad.data_parallel.agreement import BucketPlan, Handling, PlannedStep
from jdistgrad.data_parallel.averages import require_rows
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.reducer import Reducer, UnfinishedError
from jdistgrad.data_parallel.segments import Segmented, StepPrograms, Trace
from jdistgrad.errors import CollectiveError, LeafError
from jdistgrad.leaves import LeafSpec
from jdistgrad.rpc.handles import without_handles
from jdistgrad.wire import pinned

Launch = Callable[[list[Any]], None]  # called with the gradients of the next buckets


class Overlapped:
    """The executor of steps in segments, with ``overlap`` one for each bucket."""

    def __init__(self, reducer: Reducer, thread: InTurn):
        self._reducer, self._thread = reducer, thread

    def planned(
        self, programs: StepPrograms, inputs: Any, agree: Callable[[Trace], BucketPlan], *, overlap: bool
    ) -> PlannedStep:
        """Return the step of a loss. ``agree``: plans its buckets with the other ranks."""

        def make(traced: Trace) -> PlannedStep:
            plan = agree(traced)
            groups = [[slot.index for slot in bucket.slots] for bucket in plan.buckets]
            segmented = Segmented(traced.closed, groups if overlap and groups else [plan.bucketed])
            results = traced.results  # not the trace, whose jaxpr and parameters would be kept

            def compute(inputs: Any, launch: Launch) -> Any:
                return jax.tree.unflatten(results, segmented(without_handles(jax.tree.leaves(inputs)), launch))

            return PlannedStep(plan, traced.gradients, compute, traced.used)

        return programs.find(inputs, overlap, make)

    def given(self, plan: BucketPlan, leaves: Sequence[Any], structure: Any, hook: Hook | None) -> PlannedStep:
        """Return the average of given gradients as a step that computes nothing."""
        return PlannedStep(plan, structure, lambda leaves, launch: launch([leaves[k] for k in plan.bucketed]))

    def run(
        self, step: PlannedStep, inputs: Any, handling: Handling, then: Callable[[], Any] | None
    ) -> tuple[Any, list[Any], Any]:
        """Return the step's results, its averages, and the result of ``then`` (see ``Reduction``).

        Raises:
          UnfinishedError: a rank has died; repeat the step.
        """
        reduction = Reduction(self._reducer, self._thread, step.plan, handling, then)
        try:
            results = step.code(inputs, reduction.launch)
            reduction.end()
        except BaseException:
            if reduction.is_launched:
                reduction.end()
            else:
                reduction.abandon()
            raise
        averages = reduction.finish()
        return results, averages, reduction.found


class Reduction:
    """The reduction of one step's gradients.

    Gradients come in any order; buckets are launched strictly in the order of the plan. In the order of arrival, ranks
    would reduce different buckets together: silently wrong sums if the buckets' sizes are equal.

    The gradients are overwritten, except under ``Act.AVERAGE``: nobody else must hold them.

    Arguments:
      then: called on the thread of every rank as soon as the rank has the averages.
    """

    def __init__(
        self,
        reducer: Reducer,
        thread: InTurn,
        plan: BucketPlan,
        handling: Handling,
        then: Callable[[], Any] | None = None,
    ):
        self.handling = handling
        self._reducer, self._thread, self._plan, self._then = reducer, thread, plan, then
        self._end: concurrent.futures.Future[bool] | None = None
        self.found: Any = None  # by ``then``
        self._gradients: list[Any] = [None] * len(plan.terms.leaves)
        self._launched: list[concurrent.futures.Future[Any]] = []
        self._missing = [len(bucket.slots) for bucket in plan.buckets]
        self._came: set[int] = set()  # of ``ready``
        self._failed = False

    @property
    def is_launched(self) -> bool:
        """Return whether all buckets are launched: the other ranks can finish without this one's main thread."""
        return len(self._launched) == len(self._plan.buckets)

    def launch(self, gradients: Sequence[Any]) -> None:
        """Launch the next buckets, given all their gradients in the plan's order. Nothing is checked."""
        start = 0
        while start < len(gradients):
            number = len(self._launched)
            end = start + len(self._plan.buckets[number].slots)
            own = gradients[start:end]
            in_host_memory = self.handling.hook is None and not self._plan.buckets[number].sparse
            copies = pinned.copies(own) if in_host_memory else None
            places = [gradient.sharding for gradient in own] if copies is not None else None
            self._launched.append(self._thread.submit(self._average, number, own if copies is None else copies, places))
            start = end

    def ready(self, leaf: int, gradient: Any) -> None:
        """Mark the gradient of a leaf as ready, by its index in ``jax.tree.leaves``. Leaves may come in any order."""
        self._check(leaf, gradient)
        self._came.add(leaf)
        self._gradients[leaf] = gradient
        self._missing[self._plan.bucket_of[leaf]] -= 1
        while not self.is_launched and self._missing[len(self._launched)] == 0:
            slots = self._plan.buckets[len(self._launched)].slots
            taken = [self._gradients[slot.index] for slot in slots]
            for slot in slots:
                self._gradients[slot.index] = None
            self.launch(taken)

    def _check(self, leaf: int, gradient: Any) -> None:
        leaves = self._plan.terms.leaves
        if not (isinstance(leaf, int) and 0 <= leaf < len(leaves)):
            raise LeafError(f"ready: there is no leaf {leaf!r}; this tree has {len(leaves)}, counted from 0")
        if leaf in self._came:
            raise LeafError(
                f"the gradient of {leaves[leaf].path} (leaf {leaf}) was marked ready twice in one step. Each gradient "
                "is reduced once: sum the parts first.",
                path=leaves[leaf].path,
            )
        expected, sparse = leaves[leaf], index_dimensions(gradient)
        is_array = isinstance(gradient, jax.Array) or sparse
        found = Leaf(expected.path, LeafSpec(gradient.shape, gradient.dtype), sparse) if is_array else None
        if found != expected:
            shown = type(gradient).__name__ if found is None else found
            raise LeafError(
                f"ready: the gradient of {expected.path} is {shown}, expected a JAX array {expected}, which is "
                "overwritten with the average",
                path=expected.path,
            )
        if sparse:
            require_rows(expected.path, gradient)

    def abandon(self) -> None:
        """Abandon the remaining gradients: announce that to the other ranks, after the buckets already launched."""
        launched = len(self._launched)

        def give_up() -> None:
            self.handling.put_back()
            self._reducer.abandon(self.handling.step, launched)

        self._thread.submit(give_up)

    def end(self) -> None:
        """Submit the end of the step, so that other ranks need not wait for this one's main thread."""
        if self._end is None and (self._then is not None or self._reducer.votes):
            self._end = self._thread.submit(self._ended)

    def finish(self) -> list[Any]:
        """Wait for every bucket; return the averaged gradients, by leaf.

        Raises:
          UnfinishedError: a rank has died; repeat the step.
        """
        if not self.is_launched:
            missing = [leaf.path for k, leaf in enumerate(self._plan.terms.leaves) if k not in self._came]
            raise LeafError(
                f"the reduction cannot end: {len(missing)} gradients were never marked ready, first {missing[0]}. Mark "
                "every leaf ready in every step, those that are zero too.",
                path=missing[0],
            )
        self.end()
        for last in [*self._launched, self._end][-1:] if self._end is not None else self._launched[-1:]:
            last.exception()  # one wait for all buckets: each wait takes the GIL from the reducing thread
        if self._end is not None and not self._end.result():
            raise UnfinishedError(
                f"step {self.handling.step}: a rank has died, so no rank has this step's averages; the gradients are "
                "overwritten. Repeat the step: the other ranks continue without that rank."
            )
        averages = itertools.chain.from_iterable(future.result() for future in self._launched)
        for leaf, averaged in zip(self._plan.bucketed, averages, strict=True):
            self._gradients[leaf] = averaged
        return self._gradients

    def _ended(self) -> bool:
        """Return whether all ranks have the averages. If so, call ``then``."""
        errors = [error for error in (launched.exception() for launched in self._launched) if error is not None]
        if self._reducer.votes and self._reducer.failed >= self.handling.step:
            self.abandon()  # raise before the vote: the others wait to see whether this error ends the rank
        elif self._reducer.votes and not self._reducer.vote(errors[0] if errors else None):
            return False
        if self._then is not None and not errors:
            self.found = self._then()
        return True

    def _average(self, number: int, gradients: list[Any], places: list[Any] | None) -> list[Any]:
        """Average a bucket. ``places``: the shardings of the averages, if the gradients are copies in host memory."""
        if self._failed:
            raise CollectiveError(f"bucket {number} was not reduced: the reduction of one before it failed")
        if number == 0:
            self.handling.remember()
        overwrite = places is not None or self.handling.act is Act.REDUCE
        try:
            averages = self._reducer.average(self._plan, number, gradients, self.handling, overwrite=overwrite)
        except BaseException:
            self._failed = True
            self.handling.put_back()
            raise
        # If this raises, on this rank alone, the ranks go on with the next bucket: they meet there.
        return averages if places is None else jax.device_put(averages, places)
