"""Steps driven from Python, in segments or whole, and reduced by a thread of their own."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad._compat import trace_context
from jdistgrad.data_parallel.buckets import host_arrays
from jdistgrad.data_parallel.buckets.bucket import Bucket
from jdistgrad.data_parallel.buckets.leaves import describe_all, flatten, index_dimensions, is_sparse
from jdistgrad.data_parallel.collectives.host import HostCollectives
from jdistgrad.data_parallel.collectives.roll_call import Act, Joining
from jdistgrad.data_parallel.collectives.survivors import able_to_go_on
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.hooks.base import require_states
from jdistgrad.data_parallel.reducing.agreement import Terms, bit_digests
from jdistgrad.data_parallel.reducing.averaging import require_rows
from jdistgrad.data_parallel.reducing.reducer import Reducer, UnfinishedError
from jdistgrad.data_parallel.reducing.settings import BucketPlan, Handling, Rules
from jdistgrad.data_parallel.reducing.statistics import Clock, Statistics, after_step
from jdistgrad.data_parallel.steps.program import LossProgram, Programs, Trace, readiness
from jdistgrad.data_parallel.steps.reduction import Communication, Reduction
from jdistgrad.errors import CollectiveError, NonFiniteError, WorkerLostError
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.references.handles import is_handle

T = TypeVar("T")

WIDE = {np.dtype(np.float32): np.float64, np.dtype(np.complex64): np.complex128}


Then = Callable[[], Any]


class Shared(NamedTuple):
    """Which parameters any rank of a group has used."""

    group: HostCollectives
    used: np.ndarray


class Join:
    """A block of steps of which this rank may take fewer than the others; see ``DataParallel.join``."""

    def __init__(self, shadow: Callable[[], int], broadcast: Callable[[Any, int], Any]):
        self._shadow, self._broadcast = shadow, broadcast
        self.finished = False

    def finish(self, tree: Any) -> Any:
        """Declare that this rank has run out, shadow the others, and return the model of the last active rank.

        Every rank must call it once, inside the ``with`` block, after its last step.

        Arguments:
          tree: this rank's parameters and the rest of its model (optimizer state, batch statistics).

        Returns:
          The tree of the last rank to run out.
        """
        if self.finished:
            raise CollectiveError("join: finish was called twice in one block; call it once, after the last step.")
        self.finished = True
        return self._broadcast(tree, self._shadow())

    def leave(self) -> None:
        """End a block without ``finish``: shadow the others, and broadcast nothing."""
        if not self.finished:
            self.finished = True
            self._shadow()


class Driver:
    """The steps of a rank. Every rank must make a driver, and call its methods in the same order."""

    def __init__(self, collectives: HostCollectives, rules: Rules, *, goes_on: bool = True):
        adjusted = collectives.adjusted(timeout=rules.timeout, meets_in_programs=collectives.meets_in_programs)
        twin = able_to_go_on(adjusted) if goes_on else adjusted.twin()  # a channel of its own
        self._rules, self._reducer = rules, Reducer(twin, rules)
        self._untuned = rules  # of averages: a rank may meet another kind of leaves when the others have their plan
        self._thread = Communication(f"jdistgrad-reduce-{collectives.rank}")
        self._plans: dict[Any, BucketPlan] = {}
        self._usage = Usage()
        self.statistics = Statistics(hook=rules.hook_name, bucket_cap_mb=rules.bucket_cap_mb)
        self.used: Any = None

    @property
    def goes_on(self) -> bool:
        return self._reducer.votes

    @property
    def size(self) -> int:
        return self._reducer.collectives.size

    @property
    def refuses(self) -> bool:
        """Return whether there will be no more steps, as far as this rank knows."""
        self._thread.finish()
        return self._reducer.refuses

    @property
    def joining(self) -> bool:
        """True in a ``join`` block that has not ended for all ranks."""
        return self._reducer.joining is not Joining.NONE

    # The model.

    def broadcast(self, tree: Any, root: int) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        terms, memories = self._on_host(tree)
        found = self._thread.run(self._reducer.broadcast, terms, memories, root)
        return jax.tree.unflatten(structure, map(host_arrays.like, found, leaves))

    def verify(self, tree: Any) -> None:
        self._thread.run(self._reducer.verify, *self._on_host(tree))

    def mean(self, tree: Any) -> Any:
        return self._thread.run(self._reducer.mean, tree)

    def _on_host(self, tree: Any) -> tuple[Terms, list[np.ndarray]]:
        described, leaves = describe_all(tree), jax.tree.leaves(tree)
        memories = list(map(host_arrays.to_host, leaves))
        terms = self._rules.terms(tree)._replace(
            leaves=tuple(one._replace(dtype=m.dtype) for one, m in zip(described, memories, strict=True))
        )
        for k, (leaf, memory) in enumerate(zip(leaves, memories, strict=True)):
            if not memory.ndim and memory.dtype in WIDE:  # a single number travels as wide as Python's
                memories[k] = np.array(leaf if type(leaf) in host_arrays.NUMBERS else memory, WIDE[memory.dtype])
        return terms, memories

    # Steps.

    def step(self, programs: Programs, args: Args, kwargs: Kwargs, *, overlap: bool) -> tuple[Any, Any]:
        with self._telling_failures():
            program = self._compiled(programs, args, kwargs, overlap=overlap)
        return self._taken(program, args, kwargs)

    @contextlib.contextmanager
    def _telling_failures(self) -> Iterator[None]:
        """Open a block before a step. If this rank fails there, alone, by its loss or a leaf, tell the others."""
        try:
            yield
        except (CollectiveError, WorkerLostError):
            raise  # the ranks have met: the others know
        except Exception:
            self.abandon()
            raise

    def _compiled(self, programs: Programs, args: Args, kwargs: Kwargs, *, overlap: bool) -> Any:
        """Return the compiled step, which has a ``plan``."""

        def make(traced: Trace) -> LossProgram:
            return LossProgram(traced, self._agree_on_model(traced), overlap=overlap)

        return programs.find(args, kwargs, (overlap, self._rules.bucket_cap_mb), make)

    def _taken(self, program: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:

        def compute(reduction: Reduction) -> Any:
            return program.run(args, kwargs, reduction.launch)

        def begin() -> Reduction:
            return self._begin(program.plan, then=self._sharing(program.structure, program.used))

        with self._forgetting_usage(program.structure):
            results, averaged, reduction = self._whole(compute, begin)
        return results, self._end(program.plan, program.structure, averaged, reduction)

    def _whole(
        self, compute: Callable[[Reduction], T], begin: Callable[[], Reduction]
    ) -> tuple[T, list[Any], Reduction]:
        """Return what a function computes that launches all gradients of a reduction; the averages; the reduction.

        If a rank dies meanwhile, all this is done again without it.
        """
        while True:
            before = self._reducer.memory() if self.goes_on else None
            reduction = begin()
            try:
                results = compute(reduction)
                reduction.end()
            except BaseException:
                if reduction.is_launched:  # the others need nothing more of this rank's gradients
                    reduction.end()
                else:
                    reduction.abandon()
                raise
            try:
                return results, reduction.finish(), reduction
            except UnfinishedError:
                assert before is not None
                self._reducer.put_back(before)

    def local_step(self, programs: Programs, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """Take a step without averaging; return the value, and this rank's own gradients."""
        results: tuple[Any, Any] = programs.local(*args, **kwargs)
        if self._rules.find_unused_parameters:  # and the step has not failed
            self._usage.note(*programs.usage(args, kwargs))
        return results

    def average(self, gradients: Any) -> Any:
        """Return the average of a tree of gradients, which is not overwritten."""
        plan = self._plan_for(gradients)
        return self._average(plan, gradients, functools.partial(self._begin, plan, Act.AVERAGE))[0]

    def average_with(self, gradients: Any, hook: Hook | None, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the average by a hook whose states (one for each bucket) the caller keeps, and the new states."""
        plan = self._plan_for(gradients)
        if hook is not None:
            require_states(hook, states, plan.buckets)

        def begin(*, then: Then | None) -> Reduction:
            return self._begin(plan, Act.AVERAGE, then=then, hook=hook, states=dict(enumerate(states)))

        averages, handling = self._average(plan, gradients, begin)
        return averages, [handling.states[number] for number in range(len(states))]

    def _average(
        self, plan: BucketPlan, gradients: Any, begin: Callable[..., Reduction], used: Sequence[bool] | None = None
    ) -> tuple[Any, Handling]:
        leaves, structure = flatten(gradients)
        then = self._sharing(structure, used)

        def compute(reduction: Reduction) -> None:
            reduction.launch([as_gradient(plan.terms.leaves[k].path, leaves[k]) for k in plan.bucketed])

        with self._forgetting_usage(structure):
            _, averaged, reduction = self._whole(compute, lambda: begin(then=then))
        return self._end(plan, structure, averaged, reduction), reduction.handling

    def reduction(self, like: Any) -> Reduction:
        return self._begin(self._plan_for(like))

    def abandon(self) -> None:
        """Begin the next step and give it up at once."""
        self._reducer.step += 1
        self._thread.submit(self._reducer.abandon, self._reducer.step, 0)

    def buckets(self, tree: Any) -> Sequence[Bucket]:
        return self._plan_for(tree).buckets

    def _begin(self, plan: BucketPlan, act: Act = Act.REDUCE, *, then: Then | None = None, **unusual: Any) -> Reduction:
        return Reduction(self._reducer, self._thread, plan, self._handling(plan, act, **unusual), then)

    def _handling(self, plan: BucketPlan, act: Act, **unusual: Any) -> Handling:
        """Begin the next step; return the way in which its gradients are reduced."""
        self._reducer.step += 1
        return dataclasses.replace(self._reducer.default_handling(plan, act), **unusual)

    def _end(self, plan: BucketPlan, structure: Any, averaged: Sequence[Any], reduction: Reduction) -> Any:
        self._note(plan, structure, reduction.handling.clock, reduction.found)
        return jax.tree.unflatten(structure, averaged)

    def _sharing(self, structure: Any, used: Sequence[bool] | None) -> Then | None:
        """Return what shares, on the thread, which parameters this rank has used; None if nobody asks."""
        if not self._rules.find_unused_parameters:
            return None

        def share() -> Shared:
            group = self._reducer.collectives  # that of the averages: a rank may die in what follows
            return Shared(group, self._reducer.share_used(self._usage.take(structure, used)))

        return share

    @contextlib.contextmanager
    def _forgetting_usage(self, structure: Any) -> Iterator[None]:
        """Open a block that averages. If that is not finite, nothing comes of the steps without averaging before."""
        try:
            yield
        except NonFiniteError:
            self._usage.take(structure)
            raise

    def _note(self, plan: BucketPlan, structure: Any, clock: Clock, shared: Shared | None) -> None:
        """Update ``used`` and ``statistics`` after a step."""
        unused: list[str] = []
        group = self._reducer.collectives if shared is None else shared.group
        if shared is not None:
            self.used = jax.tree.unflatten(structure, shared.used.tolist())
            unused = [leaf.path for leaf, flag in zip(plan.terms.leaves, shared.used, strict=True) if not flag]
        rank, size = group.rank_at(group.rank), group.size
        self.statistics = after_step(self.statistics, plan, clock, unused, rank, size)

    # Agreement.

    def _agree_on_model(self, traced: Trace) -> BucketPlan:
        like = traced.like
        self._rules.require_sparse_paths(like)
        order = readiness(traced.closed, traced.gradients.num_leaves)
        digests = bit_digests(traced.parameters) if self._rules.check_parameters else None
        return self._agree(self._rules.terms(like, traced.static), order, digests)

    def _plan_for(self, tree: Any) -> BucketPlan:
        with self._telling_failures():
            leaves, structure = flatten(tree)
            key = kind_of(leaves, structure)
            if key not in self._plans:
                self._plans[key] = self._agree(self._untuned.terms(tree), None)
            return self._plans[key]

    def _agree(self, terms: Terms, order: Sequence[int] | None, digests: Sequence[int] | None = None) -> BucketPlan:
        plan = self._thread.run(self._reducer.agree, terms, order, digests)
        self._rules.require_averages(plan.terms.leaves)  # only now: another rank's leaf may have been a number
        return plan

    # Uneven inputs.

    @contextlib.contextmanager
    def join(self, joining: Joining) -> Iterator[Join]:
        join = Join(lambda: self._thread.run(self._reducer.shadow), self.broadcast)
        before, self._reducer.joining = self._reducer.joining, joining
        try:
            yield join
            join.leave()
        finally:
            self._reducer.joining = before


def as_gradient(path: str, leaf: Any) -> Any:
    if is_sparse(leaf):
        require_rows(path, leaf)
        return leaf
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def kind_of(leaves: Sequence[Any], structure: Any) -> Any:
    """Return a key that is equal for trees of gradients that have one plan."""
    kinds = []
    for leaf in leaves:
        is_array = hasattr(leaf, "dtype") and not is_handle(leaf)
        kinds.append((leaf.shape, leaf.dtype, index_dimensions(leaf)) if is_array else type(leaf))
    return structure, trace_context(), tuple(kinds)


class Usage:
    """The parameters used by steps that were not averaged (``no_sync``), by the structure of their gradients."""

    def __init__(self) -> None:
        self._pending: dict[Any, list[bool]] = {}

    def note(self, structure: Any, used: Sequence[bool]) -> None:
        before = self._pending.get(structure, [False] * len(used))
        self._pending[structure] = [a or b for a, b in zip(before, used, strict=True)]

    def take(self, structure: Any, used: Sequence[bool] | None = None) -> list[bool]:
        """Return which parameters this step, if any, and the steps noted since the last average have used; forget them.

        Without any such step every parameter counts as used.
        """
        if used is not None:
            self.note(structure, used)
        return self._pending.pop(structure, None) or [True] * structure.num_leaves
