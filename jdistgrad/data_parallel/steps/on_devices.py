"""Steps whose gradients stay on their devices: loss, backward pass and averages are one program, which XLA schedules.

Over ``Devices`` the program spans the devices of all ranks; over ``MPI(on_device=True)`` each rank has its own, in
which mpi4jax reduces.

A step is two programs, one of this rank's device and one that averages, where the ranks' losses differ (in the shapes
of their batches, say), where a loss calls Python or other workers, and where arrays lie on several devices of a rank,
on a mesh of one, or on another than its own.
In host memory, as without devices, is done what no such program can do: steps in a ``join`` block, in which a rank may
have no inputs, averages of sparse arrays, and averages of arrays that lie on several devices and are for a hook, or lie
elsewhere on other ranks.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events, jaxprs
from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.buckets.functions import removed
from jdistgrad.data_parallel.buckets.leaves import flatten, is_sparse
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.collectives.devices import Devices
from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.data_parallel.collectives.mpi_on_device import OnDevice
from jdistgrad.data_parallel.collectives.roll_call import Act
from jdistgrad.data_parallel.collectives.several_devices import (
    back,
    first_faults,
    lies_elsewhere,
    on_one,
    on_several,
    without_mesh,
)
from jdistgrad.data_parallel.collectives.spanning import Program, in_one_order
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.hooks.base import require_states
from jdistgrad.data_parallel.reducing.settings import BucketPlan, Handling, Rules
from jdistgrad.data_parallel.steps.compiled import average_buckets
from jdistgrad.data_parallel.steps.driver import Driver, as_gradient, kind_of
from jdistgrad.data_parallel.steps.program import Programs
from jdistgrad.data_parallel.steps.reduction import Reduction
from jdistgrad.data_parallel.steps.trace import Trace
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.functions import Args, Kwargs

log = logging.getLogger("jdistgrad.data_parallel")

# Digests that are not of a program over all devices:
APART = 1  # of no program
RANKS_OWN = 2  # of a program of each rank, which need not be equal: mpi4jax reduces in it

DIFFERENT_LOSSES = (
    "the ranks' steps differ, in the shapes of their arguments or in a number of the rank that is written into the "
    "loss: each rank computes its own backward pass, and the averages follow without overlap"
)
IN_HOST_MEMORY = (
    "gradients lie on several devices of a rank, and a hook reduces them, or other ranks have theirs elsewhere: they "
    "are averaged in host memory"
)


@dataclasses.dataclass(frozen=True)
class SpanningStep:
    """A program over all devices whose first results are gradients, which it averages.

    Attributes:
      program: None if there can be none: because the loss calls Python (other workers, for example), and a call may
        fail on one rank, while the others would wait for ever inside a program over all devices; because the loss's
        arguments do not simply lie on the rank's device; or because a hook is to get gradients on several devices.
      plan: how the gradients are averaged.
      used: for each leaf of the gradients, whether the loss depends on it.
      digest: the same for equal programs, on all ranks.
      structure: that of the gradients.
      results: the structure of the program's other results: value, and aux if any.
      alone: the step of this rank alone.
    """

    program: Program | None
    plan: BucketPlan
    digest: int
    structure: Any
    used: tuple[bool, ...] | None = None
    results: Any = None
    alone: Callable[..., Any] | None = None


class DeviceDriver(Driver):
    """The steps of a rank whose gradients stay on its device."""

    def __init__(self, collectives: Devices | OnDevice, rules: Rules):
        super().__init__(collectives, rules)
        self._devices = cast("Devices | OnDevice", self._reducer.collectives)
        self._averages: dict[Any, SpanningStep] = {}
        self._warned = set[str]()

    # Steps.

    def _compiled(self, programs: Programs, args: Args, kwargs: Kwargs, *, overlap: bool) -> Any:
        if not self.joining:
            kind = "devices", self._rules.bucket_cap_mb
            make = functools.partial(self._step_of, programs, (args, kwargs))
            leaves = jax.tree.leaves((args, kwargs))
            if any(map(self._lies_elsewhere, leaves)):
                apart = self._on_several if any(map(on_several, leaves)) else self._apart
                return programs.find(args, kwargs, (*kind, "apart"), functools.partial(apart, programs))
            return programs.find(args, kwargs, kind, make, self._devices.span)
        return super()._compiled(programs, args, kwargs, overlap=overlap)

    def _lies_elsewhere(self, leaf: Any) -> bool:
        return lies_elsewhere(leaf, self._devices.device)

    def _channel(self, collectives: HostCollectives) -> HostCollectives:
        return collectives.twin()

    def _step_of(self, programs: Programs, inputs: Any, found: Trace) -> SpanningStep:
        if jaxprs.calls_back(found.closed.jaxpr.eqns) or any(map(self._lies_elsewhere, found.closed.consts)):
            return self._apart(programs, found)
        plan = self._agree_on_model(found)
        program, digest = self._program(plan, found.closed, inputs, self._rules.hook)
        return SpanningStep(program, plan, digest, found.gradients, found.used, found.results, programs.local)

    def _on_several(self, programs: Programs, found: Trace) -> SpanningStep:
        """Return the step of a loss whose arguments lie on several devices."""
        if jaxprs.ordered_effects(found.closed):
            raise CollectiveError(
                "value_and_grad: the loss calls Python, other workers or collectives (SyncBatchNorm, say), which XLA "
                "cannot do in a program over several devices of one rank. Put the loss's arguments on one device."
            )
        return self._apart(programs, found)

    def _apart(self, programs: Programs, found: Trace) -> SpanningStep:
        plan = self._agree_on_model(found)
        return SpanningStep(None, plan, APART, found.gradients, found.used, found.results, programs.local)

    def _taken(self, program: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if not isinstance(program, SpanningStep):
            return super()._taken(program, args, kwargs)
        handling = self._handling(program.plan, Act.REDUCE)
        found = self._run(program, (args, kwargs), handling)
        if found is None:
            return self._in_two(program, args, kwargs, handling)
        averaged, rest = found
        return jax.tree.unflatten(program.results, rest), averaged

    def _in_two(self, program: SpanningStep, args: Args, kwargs: Kwargs, handling: Handling) -> tuple[Any, Any]:
        """Take a step in two programs: this rank's own backward pass, then the averages."""
        assert program.alone is not None
        if program.program is not None:
            self._warn("apart", DIFFERENT_LOSSES)
        self._thread.finish()
        with self._reducer.telling(handling.step, 0):
            results, gradients = jax.block_until_ready(program.alone(*args, **kwargs))
        return results, self._averaged(removed(gradients), program.plan, handling, program.used)

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning(text)

    # Averages of given gradients.

    def average(self, gradients: Any) -> Any:
        if self._needs_host(gradients):
            return super().average(gradients)
        return self._average_given(gradients, hook=self._rules.hook)

    def average_with(self, gradients: Any, hook: Hook | None, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        if self._needs_host(gradients):
            return super().average_with(gradients, hook, states)
        if hook is not None:
            require_states(hook, states, self.buckets(gradients))
        current = dict(enumerate(states))
        averaged = self._average_given(gradients, hook=hook, states=current)
        return averaged, [current[number] for number in range(len(states))]

    def reduction(self, like: Any) -> Reduction:
        if self._rules.hook is not None:
            raise CollectiveError("reduction: over devices a hook is part of a compiled program. Use average.")
        return super().reduction(like)

    def _needs_host(self, gradients: Any) -> bool:
        return self.joining or any(map(is_sparse, flatten(gradients)[0]))

    def _average_given(self, gradients: Any, **unusual: Any) -> Any:
        plan = self._plan_for(gradients)
        handling = self._handling(plan, Act.AVERAGE, **unusual)
        self._thread.finish()
        return self._averaged(gradients, plan, handling)

    def _averaged(
        self, gradients: Any, plan: BucketPlan, handling: Handling, used: Sequence[bool] | None = None
    ) -> Any:
        """Average gradients in a program of their own; in host memory, if the ranks cannot have one program."""
        with self._reducer.telling(handling.step, 0):
            step, own = self._average_of(gradients, plan, handling.hook)
        found = self._run(step, own, handling, used)
        if found is not None:
            return back(found[0], gradients, self._devices.device)
        self._warn("host", IN_HOST_MEMORY)
        kept = dataclasses.replace(handling, overwrite=False)
        near = gradients if handling.hook is None else on_one(gradients, self._devices.device)
        begin = functools.partial(Reduction, self._reducer, self._thread, plan, kept)
        averaged, _ = self._average(plan, near, begin, used)
        return averaged if near is gradients else back(averaged, gradients, self._devices.device)

    def _average_of(self, gradients: Any, plan: BucketPlan, hook: Hook | None) -> tuple[SpanningStep, list[Any]]:
        """Return the program that averages such gradients, and its arguments."""
        leaves, structure = jax.tree.flatten(gradients)
        own = [as_gradient("", leaf) for leaf in leaves]
        several = any(map(on_several, own))
        own = own if several else list(map(without_mesh, own))
        key = kind_of(leaves, structure), plan.digest, hook, tuple(leaf.sharding for leaf in own) if several else ()
        if key not in self._averages:
            make = self._average_on_all if several else self._average_here
            self._averages[key] = make(own, plan, structure, hook)
        return self._averages[key], own

    def _average_here(self, own: list[Any], plan: BucketPlan, structure: Any, hook: Hook | None) -> SpanningStep:
        closed = jax.make_jaxpr(lambda *xs: list(xs))(*own)
        program, digest = self._program(plan, closed, own, hook)
        return SpanningStep(program, plan, digest, structure)

    def _average_on_all(self, own: list[Any], plan: BucketPlan, structure: Any, hook: Hook | None) -> SpanningStep:
        look = self._rules.check_finite
        program = None if hook else self._devices.program_on_all(_groups(plan), own, look=look)
        return SpanningStep(program, plan, APART if program is None else program.digest, structure)

    # Programs.

    def _program(self, plan: BucketPlan, closed: Any, inputs: Any, hook: Hook | None) -> tuple[Program, int]:
        """Return a program whose first results are gradients, which it averages; and its digest."""
        like, tree = jax.tree.flatten([_first_state(bucket, hook) for bucket in plan.buckets])
        count, looks = len(plan.terms.leaves), self._rules.check_finite

        def finish(all_: Collectives, results: Sequence[Any], *state_leaves: Any) -> list[Any]:
            gradients, before = results[:count], jax.tree.unflatten(tree, state_leaves)
            averaged, after = average_buckets(plan.buckets, gradients, before, hook, all_)
            wrong = [~jnp.isfinite(gradient).all() for gradient in gradients] if looks else []
            faults = [all_.allgather(first_faults(_groups(plan), wrong))] if looks else []
            return [*averaged, *results[count:], *jax.tree.leaves(after), *faults]

        what = f"the buckets of a step (plan {plan.digest:016x})"
        program = self._devices.program(closed, [*jax.tree.leaves(inputs), *like], finish, what)
        return program, jaxprs.digest(closed) if self._devices.span is not None else RANKS_OWN

    def _run(
        self, step: SpanningStep, inputs: Any, handling: Handling, used: Sequence[bool] | None = None
    ) -> tuple[Any, list[Any]] | None:
        """Run a program on this rank's inputs; return the averages, and its other results.

        Returns None, on all ranks, and has run nothing, if the ranks have different programs, or one has none.
        """
        plan, program, begun = step.plan, step.program, time.monotonic()
        self._thread.finish()
        if program is None:
            self._reducer.meet(plan, handling, step.digest)
            return None
        with self._reducer.telling(handling.step, 0):
            states, tree = jax.tree.flatten(_states(plan, handling))
            leaves = jax.tree.leaves(inputs)
            shared = program.prepare([*leaves, *states])
        with in_one_order:
            if not self._reducer.meet(plan, handling, step.digest):
                program.forget()
                return None
            results = self._devices.dispatch(program, shared, f"step {handling.step}", leaves, step.digest)
        if events.sink is not None:
            events.tell(events.PIECE, self._devices.rank, "", "step over devices", begun, arrays=results)
        if self._rules.check_finite:
            with self._forgetting_usage(step.structure):
                self._reducer.require_finite(plan, np.asarray(results.pop()))
        count, kept = len(plan.terms.leaves), len(results) - len(states)
        handling.states.update(enumerate(jax.tree.unflatten(tree, results[kept:])))
        share = self._sharing(step.structure, step.used if used is None else used)
        self._note(plan, step.structure, handling.clock, None if share is None else self._thread.run(share))
        return jax.tree.unflatten(step.structure, results[:count]), results[count:kept]


def _groups(plan: BucketPlan) -> list[list[int]]:
    return [[slot.index for slot in bucket.slots] for bucket in plan.buckets]


def _states(plan: BucketPlan, handling: Handling) -> list[Any]:
    """Return the hook's state for each bucket; begin those that are missing."""
    for bucket in plan.buckets:
        if bucket.index not in handling.states:
            handling.states[bucket.index] = _first_state(bucket, handling.hook)
    return [handling.states[bucket.index] for bucket in plan.buckets]


def _first_state(bucket: Bucket, hook: Hook | None) -> Any:
    return () if hook is None or bucket.sparse else hook.init(bucket)
