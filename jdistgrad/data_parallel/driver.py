"""The steps of a rank: traced, planned with the other ranks, run by an executor, counted."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import trace_context
from jdistgrad.collectives import host_arrays
from jdistgrad.collectives.default import able_to_go_on
from jdistgrad.collectives.descriptions import describe, flatten, index_dimensions, is_sparse
from jdistgrad.collectives.host import HostCollectives, InTurn
from jdistgrad.collectives.mpi import MPI
from jdistgrad.collectives.roll_call import Act, Joining
from jdistgrad.data_parallel.agreement import BucketPlan, Handling, PlannedStep, Rules, Settings, Terms, digest_of
from jdistgrad.data_parallel.averages import require_rows
from jdistgrad.data_parallel.hooks import Hook, require_states
from jdistgrad.data_parallel.on_device import OnDevice
from jdistgrad.data_parallel.overlapped import Overlapped, Reduction
from jdistgrad.data_parallel.reducer import Reducer, UnfinishedError
from jdistgrad.data_parallel.segments import StepPrograms, Trace, readiness
from jdistgrad.data_parallel.statistics import Statistics, after_step
from jdistgrad.errors import CollectiveError, NonFiniteError, WorkerLostError
from jdistgrad.leaves import LeafSpec
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.handles import is_handle

WIDE = {np.dtype(np.float32): np.float64, np.dtype(np.complex64): np.complex128}


class Join:
    """A block of steps of which this rank may take fewer than the others; see ``DataParallel.join``."""

    def __init__(self, shadow: Callable[[], int], broadcast: Callable[[Any, int], Any]):
        self._shadow, self._broadcast = shadow, broadcast
        self.finished = False

    def finish(self, tree: Any) -> Any:
        """Declare that this rank has no more inputs, shadow the others, and return the model of the last active rank.

        Every rank must call it once, inside the ``with`` block, after its last step.

        Arguments:
          tree: this rank's parameters and the rest of its model (optimizer state, batch statistics).

        Returns:
          The tree of the last rank that had inputs.
        """
        if self.finished:
            raise CollectiveError("join: finish was called twice in one block. Call it once, after the last step.")
        self.finished = True
        return self._broadcast(tree, self._shadow())


class Driver:
    """The steps of a rank. Every rank must make a driver, and call its methods in the same order.

    A step is traced, planned with the other ranks, and run by an executor: ``Overlapped``, or ``OnDevice`` where
    gradients stay on the rank's device. ``Overlapped`` also runs steps in a ``join`` block, in which a rank may have no
    inputs, and averages of sparse arrays: programs over devices can do neither.
    """

    def __init__(self, collectives: HostCollectives, rules: Rules):
        adjusted = collectives.adjusted(timeout=rules.timeout, meets_in_programs=collectives.meets_in_programs)
        on_device = isinstance(collectives, MPI) and collectives.device is not None
        twin = adjusted.twin() if on_device else able_to_go_on(adjusted)  # a channel of its own
        self._rules, self.reducer, self._thread = rules, Reducer(twin, rules), InTurn()
        self._overlapped = Overlapped(self.reducer, self._thread)
        self._executor = OnDevice(self.reducer, self._thread, rules) if on_device else self._overlapped
        self._plans: dict[Any, BucketPlan] = {}
        self._noted: dict[Any, list[bool]] = {}  # by structure, the parameters used by steps since the last average
        self.statistics = Statistics(hook=rules.hook.name if rules.hook else "none", bucket_cap_mb=rules.bucket_cap_mb)
        self.used: Any = None

    @property
    def refuses(self) -> bool:
        """Return whether this rank already knows that the next step will fail."""
        self._thread.finish()
        return self.reducer.broken is not None or bool(self.reducer.announced)

    @property
    def joining(self) -> bool:
        """True in a ``join`` block that some rank is still in."""
        return self.reducer.joining is not Joining.NONE

    # The model.

    def broadcast(self, tree: Any, root: int) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        terms, memories = self._on_host(tree)
        found = self._thread.run(self.reducer.broadcast, terms, memories, root)
        return jax.tree.unflatten(structure, map(host_arrays.like, found, leaves))

    def verify(self, tree: Any) -> None:
        self._thread.run(self.reducer.verify, *self._on_host(tree))

    def mean(self, tree: Any) -> Any:
        return self._thread.run(self.reducer.mean, tree)

    def _on_host(self, tree: Any) -> tuple[Terms, list[np.ndarray]]:
        described, leaves = describe(tree, whole=False), jax.tree.leaves(tree)
        memories = list(map(host_arrays.to_host, leaves))
        terms = self._rules.terms(tree)._replace(
            leaves=tuple(one._replace(spec=LeafSpec.of(m)) for one, m in zip(described, memories, strict=True))
        )
        for k, (leaf, memory) in enumerate(zip(leaves, memories, strict=True)):
            if not memory.ndim and memory.dtype in WIDE:  # a single number travels as wide as Python's
                memories[k] = np.array(leaf if type(leaf) in host_arrays.NUMBERS else memory, WIDE[memory.dtype])
        return terms, memories

    # Steps.

    def step(self, programs: StepPrograms, args: Args, kwargs: Kwargs, *, overlap: bool) -> tuple[Any, Any]:
        executor = self._overlapped if self.joining else self._executor
        with self._announcing_failures():
            step = executor.planned(programs, (args, kwargs), self._agree_on_model, overlap=overlap)
        return self._run(executor, step, (args, kwargs), Act.REDUCE)[:2]

    @contextlib.contextmanager
    def _announcing_failures(self) -> Iterator[None]:
        """Open a block before a step. If this rank alone fails there, by its loss or a leaf, notify the others."""
        try:
            yield
        except (CollectiveError, WorkerLostError):
            raise  # the ranks have met: the others know
        except Exception:
            self.abandon()
            raise

    def _run(
        self, executor: Overlapped | OnDevice, step: PlannedStep, inputs: Any, act: Act, **unusual: Any
    ) -> tuple[Any, Any, Handling]:
        """Return a step's results, the averages, and their ``Handling``. If a rank dies, repeat the step without it."""
        while True:
            before = self.reducer.step
            handling = self._handling(step.plan, act, **unusual)
            try:
                results, averages, shared = executor.run(step, inputs, handling, self._sharing(step))
            except UnfinishedError:
                handling.put_back()
                self.reducer.step = before
                continue
            except NonFiniteError:
                self._take_noted(step.structure)  # the steps under no_sync before this one are lost, too
                raise
            self._note(step, handling, shared)
            return results, jax.tree.unflatten(step.structure, averages), handling

    def local_step(self, programs: StepPrograms, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Take a step without averaging; return the value, and this rank's own gradients."""
        results: tuple[Any, Any] = programs.local(*args, **kwargs)
        if self._rules.find_unused_parameters:  # and the step has not failed
            structure, used = programs.find((args, kwargs), "usage", lambda traced: (traced.gradients, traced.used))
            self._noted[structure] = self._take_noted(structure, used)
        return results

    def average(self, gradients: Any) -> Any:
        """Return the average of a tree of gradients, which is not overwritten."""
        return self._average(gradients, self.plan_for(gradients))[0]

    def average_with(self, gradients: Any, hook: Hook | None, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the average by a hook, and the hook's new states, which the caller keeps (one for each bucket)."""
        plan = self.plan_for(gradients)
        if hook is not None:
            require_states(hook, states, plan.buckets)
        averages, handling = self._average(gradients, plan, hook=hook, states=dict(enumerate(states)))
        return averages, [handling.states[number] for number in range(len(states))]

    def _average(self, gradients: Any, plan: BucketPlan, **unusual: Any) -> tuple[Any, Handling]:
        leaves, structure = flatten(gradients)
        executor = self._overlapped if self.joining or any(map(is_sparse, leaves)) else self._executor
        with self._announcing_failures():
            own = [as_gradient(leaf.path, given) for leaf, given in zip(plan.terms.leaves, leaves, strict=True)]
            step = executor.given(plan, own, structure, unusual.get("hook", self._rules.hook))
        return self._run(executor, step, own, Act.AVERAGE, **unusual)[1:]

    def reduction(self, like: Any) -> Reduction:
        if self._executor is not self._overlapped and self._rules.hook is not None:
            raise CollectiveError("reduction: over devices a hook is part of a compiled program. Use average.")
        plan = self.plan_for(like)
        return Reduction(self.reducer, self._thread, plan, self._handling(plan, Act.REDUCE))

    def abandon(self) -> None:
        self.reducer.step += 1
        self._thread.submit(self.reducer.abandon, self.reducer.step, 0)

    def _handling(self, plan: BucketPlan, act: Act, **unusual: Any) -> Handling:
        self.reducer.step += 1
        return dataclasses.replace(self.reducer.default_handling(plan, act), **unusual)

    def _sharing(self, step: PlannedStep) -> Callable[[], Any] | None:
        """Return a function that gathers, on the thread, which parameters any rank has used; None if not needed.

        The function also returns the group of ranks that it has asked.
        """
        if not self._rules.find_unused_parameters:
            return None

        def share() -> tuple[HostCollectives, np.ndarray]:
            group = self.reducer.collectives  # the group of the averages: a rank may die in share_used
            return group, self.reducer.share_used(self._take_noted(step.structure, step.used))

        return share

    def _take_noted(self, structure: Any, used: Sequence[bool] | None = None) -> list[bool]:
        """Return which parameters this step (if any) and those since the last average have used; reset the latter.

        Without any such step every parameter counts as used.
        """
        noted = self._noted.pop(structure, None)
        if used is None:
            return noted or [True] * structure.num_leaves
        return [a or b for a, b in zip(noted or [False] * len(used), used, strict=True)]

    def _note(self, step: PlannedStep, handling: Handling, shared: Any) -> None:
        """Update ``used`` and ``statistics`` after a step. ``shared``: the result of ``_sharing``'s function."""
        group, used = shared or (self.reducer.collectives, None)
        unused: list[str] = []
        if used is not None:
            self.used = jax.tree.unflatten(step.structure, used.tolist())
            unused = [leaf.path for leaf, flag in zip(step.plan.terms.leaves, used, strict=True) if not flag]
        rank, size = group.rank_at(group.rank), group.size
        self.statistics = after_step(self.statistics, step.plan, handling, unused, rank, size)

    # Agreement.

    def _agree_on_model(self, traced: Trace) -> BucketPlan:
        avals = traced.closed.out_avals[: traced.gradients.num_leaves]
        like = jax.tree.unflatten(traced.gradients, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals])
        self._rules.require_sparse_paths(like)
        order = readiness(traced.closed, traced.gradients.num_leaves)
        digests = list(map(digest_of, traced.parameters)) if self._rules.check_parameters else None
        return self._agree(self._rules.terms(like, traced.static), order, digests)

    def plan_for(self, tree: Any) -> BucketPlan:
        with self._announcing_failures():
            leaves, structure = flatten(tree)
            key = kind_of(leaves, structure)
            if key not in self._plans:
                self._plans[key] = self._agree(self._rules.terms(tree), None)
            return self._plans[key]

    def _agree(self, terms: Terms, order: Sequence[int] | None, digests: Sequence[bytes] | None = None) -> BucketPlan:
        plan = self.reducer.plans.get(terms.digest())
        if plan is None:
            plan = self._thread.run(self.reducer.agree, terms, order, digests)
        self._rules.require_averages(plan.terms.leaves)  # only now: another rank's leaf may have been a number
        return plan

    # Uneven inputs.

    @contextlib.contextmanager
    def join(self, joining: Joining) -> Iterator[Join]:
        join = Join(lambda: self._thread.run(self.reducer.shadow), self.broadcast)
        before = self.reducer.enter(joining)
        try:
            yield join
            if not join.finished:  # shadow the others, without a broadcast
                join.finished = True
                self._thread.run(self.reducer.shadow)
        finally:
            self.reducer.enter(before)


def as_gradient(path: str, leaf: Any) -> Any:
    if is_sparse(leaf):
        require_rows(path, leaf)
        return leaf
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def kind_of(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the key of a tree of gradients, by which its plan is cached."""
    kinds = []
    for leaf in leaves:
        is_array = hasattr(leaf, "dtype") and not is_handle(leaf)
        kinds.append((leaf.shape, leaf.dtype, index_dimensions(leaf)) if is_array else type(leaf))
    return structure, trace_context(), tuple(kinds)


Drivers = weakref.WeakKeyDictionary[HostCollectives, dict[Settings, Driver]]


def shared_driver(collectives: HostCollectives, rules: Rules, *, renew: bool = False) -> Driver:
    """Return this worker's driver for these collectives and settings. Hooks are compared by name.

    Arguments:
      renew: replace a driver whose next step would fail.
    """
    drivers: Drivers = collectives.keeper().kept.setdefault("drivers", Drivers())
    found = drivers.setdefault(collectives, {})
    if rules.settings not in found or (renew and found[rules.settings].refuses):
        found[rules.settings] = Driver(collectives, dataclasses.replace(rules, timeout=collectives.timeout))
    return found[rules.settings]
