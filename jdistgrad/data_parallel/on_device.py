"""Steps whose gradients stay on their devices: XLA schedules loss, backward pass and averages in one program.

Over ``Devices`` the program spans the devices of all ranks; over ``MPI(on_device=True)`` each rank has its own, in
which mpi4jax reduces.

A step is two programs, one of this rank alone and one that averages, if the ranks' losses differ (in the shapes of
their batches, say), if a loss calls Python or other workers, or if arrays are on several devices of a rank: then the
loss is compiled with the user's shardings, and one copy of replicated gradients is averaged.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events, jaxprs
from jdistgrad._compat import trace_context
from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.descriptions import removed
from jdistgrad.collectives.host import InTurn
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.spanning import Program, at_home, in_one_order, where_it_was
from jdistgrad.data_parallel.agreement import BucketPlan, Handling, PlannedStep, Rules
from jdistgrad.data_parallel.buckets import Bucket
from jdistgrad.data_parallel.compiled import average_buckets
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.reducer import Reducer
from jdistgrad.data_parallel.segments import StepPrograms, Trace
from jdistgrad.errors import CollectiveError

log = logging.getLogger("jdistgrad.data_parallel")

NO_PROGRAM, RANKS_OWN = 1, 2  # digests; mpi4jax reduces in each rank's own program, and these may differ

DIFFERENT_LOSSES = (
    "the ranks' steps differ, in the shapes of their arguments or in a number of the rank that is written into the "
    "loss: each rank computes its own backward pass, and the averages follow without overlap"
)


class OnDevice:
    """The executor of steps whose gradients stay on the rank's device."""

    def __init__(self, reducer: Reducer, thread: InTurn, rules: Rules):
        self._reducer, self._thread, self._rules = reducer, thread, rules
        self._devices = cast("MPI", reducer.collectives)
        self._of_given: dict[Any, PlannedStep] = {}
        self._warned = False

    def planned(
        self, programs: StepPrograms, inputs: Any, agree: Callable[[Trace], BucketPlan], *, overlap: bool
    ) -> PlannedStep:
        """Return the step of a loss; XLA decides about overlap. ``agree``: see ``Overlapped``."""
        divided = any(map(_on_several, jax.tree.leaves(inputs)))

        def make(found: Trace) -> PlannedStep:
            if divided and jaxprs.ordered_effects(found.closed):
                raise CollectiveError(
                    "value_and_grad: the loss calls Python, other workers or collectives (SyncBatchNorm, say), which "
                    "XLA cannot do in a program over several devices of one rank. Put the loss's arguments on one "
                    "device."
                )
            plan, closed = agree(found), found.closed
            program, digest = None, NO_PROGRAM
            if not (divided or jaxprs.calls_back(closed.jaxpr.eqns) or any(map(_on_several, closed.consts))):
                program, digest = self._program(plan, closed, inputs, self._rules.hook)
            return PlannedStep(plan, found.gradients, programs.local, found.used, program, digest, found.results)

        return programs.find(inputs, ("devices", divided), make, None if divided else self._devices.span)

    def given(self, plan: BucketPlan, leaves: Sequence[Any], structure: Any, hook: Hook | None) -> PlannedStep:
        key = plan.digest, structure, tuple(map(jax.typeof, leaves)), trace_context(), hook
        if key not in self._of_given:
            own = [at_home(leaf, self._devices.device) for leaf in leaves]
            closed = jax.make_jaxpr(lambda *xs: list(xs))(*own)
            program, digest = self._program(plan, closed, own, hook)
            self._of_given[key] = PlannedStep(plan, structure, None, program=program, digest=digest)
        return self._of_given[key]

    def run(
        self, step: PlannedStep, inputs: Any, handling: Handling, then: Callable[[], Any] | None
    ) -> tuple[Any, list[Any], Any]:
        """Return the step's results, its averages, and the result of ``then``.

        Averages of given gradients have the sharding of the gradients.
        """
        leaves = jax.tree.leaves(inputs)
        self._thread.finish()
        found = self._run(step, leaves, handling)
        if step.code is None:
            assert found is not None  # equal plans have equal programs
            results, averages = None, list(map(where_it_was, found[0], leaves))
        elif found is not None:
            averages, results = found[0], jax.tree.unflatten(step.results, found[1])
        else:
            results, averages = self._in_two(step, inputs, handling)
        return results, averages, None if then is None else self._thread.run(then)

    def _in_two(self, step: PlannedStep, inputs: Any, handling: Handling) -> tuple[Any, list[Any]]:
        """Run this rank's own backward pass, then the averages: the ranks' programs differ."""
        if step.program is not None and not self._warned:
            self._warned = True
            log.warning(DIFFERENT_LOSSES)
        args, kwargs = inputs
        with self._reducer.announcing(handling.step, 0):
            results, gradients = jax.block_until_ready(step.code(*args, **kwargs))
            leaves, structure = jax.tree.flatten(removed(gradients))
            average = self.given(step.plan, leaves, structure, handling.hook)
        return results, self.run(average, leaves, handling, None)[1]

    def _program(self, plan: BucketPlan, closed: Any, inputs: Any, hook: Hook | None) -> tuple[Program, int]:
        """Return a program that averages its first results, the gradients; and its digest."""
        like, tree = jax.tree.flatten([_first_state(bucket, hook) for bucket in plan.buckets])
        count, looks = len(plan.terms.leaves), self._rules.check_finite

        def finish(all_: Collectives, results: Sequence[Any], *state_leaves: Any) -> list[Any]:
            gradients, before = results[:count], jax.tree.unflatten(tree, state_leaves)
            averaged, after = average_buckets(plan.buckets, gradients, before, hook, all_)
            wrong = [~jnp.isfinite(gradient).all() for gradient in gradients] if looks else []
            faults = [all_.allgather(_first_faults(plan, wrong))] if looks else []
            return [*averaged, *results[count:], *jax.tree.leaves(after), *faults]

        what = f"the buckets of a step (plan {plan.digest:016x})"
        program = self._devices.program(closed, [*jax.tree.leaves(inputs), *like], finish, what)
        return program, jaxprs.digest(closed) if self._devices.span is not None else RANKS_OWN

    def _run(
        self, step: PlannedStep, leaves: Sequence[Any], handling: Handling
    ) -> tuple[list[jax.Array], list[Any]] | None:
        """Run a program on this rank's inputs; return the averages, and its other results.

        If the ranks' programs differ, or one has none, run nothing and return None, on all ranks.
        """
        plan, program, digest, begun = step.plan, step.program, step.digest, time.monotonic()
        if program is None:
            self._reducer.meet(plan, handling, digest)
            return None
        with self._reducer.announcing(handling.step, 0):
            first = {bucket.index: _first_state(bucket, handling.hook) for bucket in plan.buckets}
            handling.states.update(first | handling.states)
            states, tree = jax.tree.flatten([handling.states[bucket.index] for bucket in plan.buckets])
            own = [at_home(leaf, self._devices.device) for leaf in leaves]
            shared = program.prepare([*own, *states])
        with in_one_order:
            if not self._reducer.meet(plan, handling, digest):
                program.forget()
                return None
            results = self._devices.dispatch(program, shared, f"step {handling.step}", own, digest)
        if events.sink is not None:
            events.report(events.PIECE, self._devices.rank, "", "step over devices", begun, arrays=results)
        if self._rules.check_finite:
            faults = np.asarray(results.pop())  # [rank, bucket]
            for bucket in plan.buckets:
                self._reducer.require_finite(bucket, faults[:, bucket.index].tolist())
        count, kept = len(plan.terms.leaves), len(results) - len(states)
        handling.states.update(enumerate(jax.tree.unflatten(tree, results[kept:])))
        return results[:count], results[count:kept]


def _on_several(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return len(leaf.devices()) > 1 and leaf.is_fully_addressable


def _first_faults(plan: BucketPlan, wrong: Sequence[jax.Array]) -> jax.Array:
    """Return for each bucket 0, or 1 plus the index of its first wrong gradient."""
    flags = [jnp.stack([jnp.zeros((), bool), *(wrong[slot.index] for slot in bucket.slots)]) for bucket in plan.buckets]
    return jnp.array([jnp.argmax(one) for one in flags], jnp.int32)


def _first_state(bucket: Bucket, hook: Hook | None) -> Any:
    return () if hook is None or bucket.sparse else hook.init(bucket)
