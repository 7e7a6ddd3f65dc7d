"""Steps whose gradients stay on their devices: loss, backward pass and averages are one program, which XLA schedules.

Over ``Devices`` the program spans the devices of all ranks; over ``MPI(on_device=True)`` each rank has its own, in
which mpi4jax reduces.

A step is two programs, one of this rank alone and one that averages, where the ranks' losses differ (in the shapes of
their batches, say), where a loss calls Python or other workers, and where arrays lie on several devices of a rank: then
the loss is compiled as the user has divided it, and of gradients that all devices hold, one copy is averaged.
In host memory, as without devices, is done what no such program can do: steps in a ``join`` block, in which a rank may
have no inputs, and averages of sparse arrays.
"""

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad import events, jaxprs
from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.collectives.leaves import flatten, is_sparse, removed
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.roll_call import Act
from jdistgrad.collectives.spanning import Program, at_home, in_one_order
from jdistgrad.data_parallel.buckets import Bucket
from jdistgrad.data_parallel.compiled import average_buckets
from jdistgrad.data_parallel.driver import Driver, as_gradient, kind_of
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.program import Programs, Trace
from jdistgrad.data_parallel.reduction import Reduction
from jdistgrad.data_parallel.rules import BucketPlan, Handling, Rules, Settings
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


@dataclasses.dataclass(frozen=True)
class SpanningStep:
    """A program over all devices whose first results are gradients, which it averages.

    Attributes:
      program: None if there can be none: because the loss calls Python (other workers, for example), and a call may
        fail on one rank, while the others would wait for ever inside a program over all devices; or because the loss's
        arguments lie on several devices.
      structure: that of the gradients. ``results``: that of the other results: value, and aux if any.
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

    def __init__(self, collectives: MPI, rules: Rules):
        super().__init__(collectives, rules, goes_on=False)
        self._devices = cast("MPI", self.reducer.collectives)
        self._averages: dict[Any, SpanningStep] = {}
        self._warned = False

    # Steps.

    def _compiled(self, programs: Programs, args: Args, kwargs: Kwargs, *, overlap: bool) -> Any:
        if self.joining:
            return super()._compiled(programs, args, kwargs, overlap=overlap)
        leaves = jax.tree.leaves((args, kwargs))
        divided = any(map(_on_several, leaves))
        if not divided:
            for leaf in leaves:
                at_home(leaf, self._devices.device)
        make = functools.partial(self._step_of, programs, (args, kwargs), divided=divided)
        return programs.find(args, kwargs, ("devices", divided), make, None if divided else self._devices.span)

    def _step_of(self, programs: Programs, inputs: Any, found: Trace, *, divided: bool) -> SpanningStep:
        if divided and jaxprs.ordered_effects(found.closed):
            raise CollectiveError(
                "value_and_grad: the loss calls Python, other workers or collectives (SyncBatchNorm, say), which XLA "
                "cannot do in a program over several devices of one rank. Put the loss's arguments on one device."
            )
        plan = self._agree_on_model(found)
        program, digest = None, APART
        if not (divided or jaxprs.calls_back(found.closed.jaxpr.eqns) or any(map(_on_several, found.closed.consts))):
            program, digest = self._program(plan, found.closed, inputs, self._rules.hook)
        return SpanningStep(program, plan, digest, found.gradients, found.used, found.results, programs.local)

    def _taken(self, program: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        if not isinstance(program, SpanningStep):
            return super()._taken(program, args, kwargs)
        handling = self._handling(program.plan, Act.REDUCE)
        found = self._run(program, (args, kwargs), handling)
        if found is not None:
            averaged, rest = found
            return jax.tree.unflatten(program.results, rest), averaged
        assert program.alone is not None  # in two programs: this rank's own backward pass, then the averages
        if program.program is not None and not self._warned:
            self._warned = True
            log.warning(DIFFERENT_LOSSES)
        self._thread.finish()
        with self.reducer.telling(handling.step, 0):
            results, gradients = jax.block_until_ready(program.alone(*args, **kwargs))
        return results, self._averaged(removed(gradients), program.plan, handling, program.used)

    # Averages of given gradients.

    def _average(self, gradients: Any, plan: BucketPlan, **unusual: Any) -> tuple[Any, Handling]:
        if self.joining or any(map(is_sparse, flatten(gradients)[0])):
            return super()._average(gradients, plan, **unusual)
        handling = self._handling(plan, Act.AVERAGE, **unusual)
        self._thread.finish()
        return self._averaged(gradients, plan, handling), handling

    def reduction(self, like: Any) -> Reduction:
        if self._rules.hook is not None:
            raise CollectiveError("reduction: over devices a hook is part of a compiled program. Use average.")
        return super().reduction(like)

    def _averaged(
        self, gradients: Any, plan: BucketPlan, handling: Handling, used: Sequence[bool] | None = None
    ) -> Any:
        """Average gradients in a program of their own. What all devices of the rank hold, they hold again."""
        with self.reducer.telling(handling.step, 0):
            leaves, structure = jax.tree.flatten(gradients)
            own = [at_home(as_gradient("", leaf), self._devices.device) for leaf in leaves]
            key = kind_of(leaves, structure), plan.digest, handling.hook
            if key not in self._averages:
                closed = jax.make_jaxpr(lambda *xs: list(xs))(*own)
                program, digest = self._program(plan, closed, own, handling.hook)
                self._averages[key] = SpanningStep(program, plan, digest, structure)
        found = self._run(self._averages[key], own, handling, used)
        assert found is not None  # ranks of one plan have one program

        def put_back(x: jax.Array, before: Any) -> jax.Array:
            return jax.device_put(x, before.sharding) if _on_several(before) else x

        return jax.tree.map(put_back, found[0], gradients)

    # Programs.

    def _program(self, plan: BucketPlan, closed: Any, inputs: Any, hook: Hook | None) -> tuple[Program, int]:
        """Return a program whose first results are gradients, which it averages; and its digest."""
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
        self, step: SpanningStep, inputs: Any, handling: Handling, used: Sequence[bool] | None = None
    ) -> tuple[Any, list[Any]] | None:
        """Run a program on this rank's inputs; return the averages, and its other results.

        Returns None, on all ranks, and has run nothing, if the ranks have different programs, or one has none.
        """
        plan, program, begun = step.plan, step.program, time.monotonic()
        self._thread.finish()
        if program is None:
            self.reducer.meet(plan, handling, step.digest)
            return None
        with self.reducer.telling(handling.step, 0):
            for bucket in plan.buckets:
                if bucket.index not in handling.states:
                    handling.states[bucket.index] = _first_state(bucket, handling.hook)
            states, tree = jax.tree.flatten([handling.states[bucket.index] for bucket in plan.buckets])
            leaves = jax.tree.leaves(inputs)
            shared = program.prepare([*leaves, *states])
        with in_one_order:
            if not self.reducer.meet(plan, handling, step.digest):
                program.forget()
                return None
            results = self._devices.dispatch(program, shared, f"step {handling.step}", leaves, step.digest)
        if events.sink is not None:
            events.tell(events.PIECE, self._devices.rank, "", "step over devices", begun, arrays=results)
        if self._rules.check_finite:
            faults = np.asarray(results.pop())  # by rank, a row with the fault of each bucket
            if faults.any():
                self._take_noted(step.structure)  # nothing comes of the steps without averaging before
            for bucket in plan.buckets:
                self.reducer.require_finite(bucket, faults[:, bucket.index].tolist())
        count, kept = len(plan.terms.leaves), len(results) - len(states)
        handling.states.update(enumerate(jax.tree.unflatten(tree, results[kept:])))
        share = self._sharing(step.structure, step.used if used is None else used)
        self._note(plan, step.structure, handling, None if share is None else self._thread.run(share))
        return jax.tree.unflatten(step.structure, results[:count]), results[count:kept]


def _on_several(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return len(leaf.devices()) > 1 and leaf.is_fully_addressable


def _first_faults(plan: BucketPlan, wrong: Sequence[jax.Array]) -> jax.Array:
    """Return for each bucket 0, or 1 plus the place of the first of its gradients that is wrong."""
    found = [jnp.zeros((), jnp.int32)]
    for bucket in plan.buckets:
        flags = jnp.stack([wrong[slot.index] for slot in bucket.slots])
        found.append(jnp.where(flags.any(), 1 + jnp.argmax(flags), 0).astype(jnp.int32))
    return jnp.stack(found)[1:]


def _first_state(bucket: Bucket, hook: Hook | None) -> Any:
    return () if hook is None or bucket.sparse else hook.init(bucket)


def new_driver(collectives: HostCollectives, rules: Rules) -> Driver:
    if isinstance(collectives, MPI) and collectives.device is not None:
        return DeviceDriver(collectives, rules)
    return Driver(collectives, rules)


Drivers = weakref.WeakKeyDictionary[HostCollectives, dict[Settings, Driver]]


def shared_driver(collectives: HostCollectives, rules: Rules, *, anew: bool = False) -> Driver:
    """Return the one driver for these collectives and settings here. Hooks of one name count as the same setting.

    Arguments:
      anew: if the ranks have come apart in its steps, begin with another one.
    """
    drivers: Drivers = collectives.keeper().kept.setdefault("drivers", Drivers())
    found = drivers.setdefault(collectives, {})
    if rules.settings not in found or (anew and found[rules.settings].refuses):
        found[rules.settings] = new_driver(collectives, dataclasses.replace(rules, timeout=collectives.timeout))
    return found[rules.settings]
