"""DataParallel: the same model on every rank, gradients averaged."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jdistgrad.autograd.contexts import Context
from jdistgrad.data_parallel import arrays, in_context, inside, verification
from jdistgrad.data_parallel.agreement import Terms
from jdistgrad.data_parallel.collectives import Collectives, Mesh
from jdistgrad.data_parallel.collectives.default import of_this_world
from jdistgrad.data_parallel.communication import Communication
from jdistgrad.data_parallel.hooks import Hook, average as plain_average, checked
from jdistgrad.data_parallel.join import Join
from jdistgrad.data_parallel.layout import Bucket
from jdistgrad.data_parallel.leaves import describe, flatten, is_sparse, require_inexact
from jdistgrad.data_parallel.memory import own_copies
from jdistgrad.data_parallel.plan import limits_of
from jdistgrad.data_parallel.program import Programs
from jdistgrad.data_parallel.reducer import Plan, Reducer, Rules, make_plan
from jdistgrad.data_parallel.reduction import Reduction
from jdistgrad.data_parallel.statistics import Statistics, after_step
from jdistgrad.errors import CollectiveError, HookError
from jdistgrad.rpc.references import RRef


class DataParallel:
    """Averages gradients over all ranks, bucket by bucket, while the backward pass still runs.

    Every rank must make one, with the same settings, and take the same steps with it.

    Arguments:
      collectives: which ranks; default all workers of this world.
      bucket_cap_mb: how many MiB of gradients travel together; default 25, and 1 for the first bucket.
      find_unused_parameters: find out after each step which parameters no rank's loss depends on (``used``).
      hook: what to do with a bucket instead of averaging it; see ``hooks``.
      overlap: cut the backward pass so that the first buckets travel while it runs. The numbers are the same without.
        By default where something is gained: on accelerators, between machines, or with a core to spare for each rank.
      sparse: paths of leaves (as messages spell them: ``['embedding']``) of whose gradients few rows differ from zero:
        only these travel.
      check_finite: look for NaN and infinity before each reduction, and say on which rank and in which leaf.
      timeout: seconds to wait for the slowest rank.

    Example:
      >>> dp = jd.DataParallel()
      >>> params = dp.broadcast(params)
      >>> step = dp.value_and_grad(loss)
      >>> value, gradients = step(params, batch_of_this_rank)
    """

    def __init__(
        self,
        collectives: Collectives | None = None,
        *,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        hook: Hook | None = None,
        overlap: bool | None = None,
        sparse: Sequence[str] = (),
        check_finite: bool = False,
        timeout: float = 300.0,
    ):
        paths = frozenset(sparse)
        self._rules = Rules(limits_of(bucket_cap_mb), checked(hook), paths.__contains__, check_finite, timeout)
        self._settings = (
            ("bucket_cap_mb", str(bucket_cap_mb)),
            ("the hook", hook.name if hook else "none"),
            ("find_unused_parameters", str(find_unused_parameters)),
            ("check_finite", str(check_finite)),
            ("sparse", str(sorted(paths))),
        )
        self.collectives = of_this_world() if collectives is None else collectives
        if not isinstance(self.collectives, Collectives):
            raise TypeError(
                f"DataParallel: collectives must be one of jd.collectives' MPI, Local and Mesh, not {collectives!r:.60}"
            )
        has_room = self.collectives.has_room or jax.default_backend() != "cpu"
        self.find_unused_parameters, self.overlap = find_unused_parameters, has_room if overlap is None else overlap
        self.used: Any = None
        self._syncing, self._joining = True, False
        self._statistics = Statistics(hook=self._settings[1][1])
        self._trees: dict[Any, Plan] = {}
        self._on_mesh = isinstance(self.collectives, Mesh)
        if not self._on_mesh:
            self._reducer = Reducer(self.collectives.twin(), self._rules)
            self._thread = Communication(f"jdistgrad-reduce-{self.collectives.rank}")

    # The model.

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """The root's tree: parameters, batch statistics, anything of arrays. Every rank must call it."""
        if inside.is_traced(tree) or self._on_mesh:
            return jax.tree.map(lambda leaf: self.collectives.broadcast(leaf, root), tree)
        leaves, structure = jax.tree.flatten(tree)
        memories = [arrays.to_host(leaf) for leaf in leaves]
        terms = Terms(tuple(describe(tree)), self._settings)
        self._thread.run(self._reducer.broadcast, terms, memories, self.collectives._checked_root(root))
        return jax.tree.unflatten(structure, map(arrays.like, memories, leaves))

    def verify(self, tree: Any) -> None:
        """Check that a tree is the same on every rank, bit for bit. Every rank must call it.

        Raises:
          DisagreementError: naming the leaf, the place in it, the rank and both values.
        """
        if self._on_mesh:
            raise CollectiveError("verify: the ranks of a mesh run one program on one array: nothing to compare")
        leaves = [arrays.to_host(leaf) for leaf in jax.tree.leaves(tree)]
        verification.verify(describe(tree), leaves, lambda value: self._thread.run(self._reducer.gather, value))

    # Steps.

    def value_and_grad(
        self, loss_fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
    ) -> Callable[..., Any]:
        """As ``jax.value_and_grad``, of which the gradients are averaged over all ranks; the value is this rank's.

        The loss must be fit for ``jax.jit``: it is traced once for each shape of its arguments. Inside ``jax.jit`` or
        ``jax.shard_map`` the step becomes part of the compiled program; called from Python it is cut into pieces, and
        buckets travel while later pieces run. Every rank must call the returned function equally often.
        """
        programs = Programs(loss_fn, argnums, has_aux)

        @functools.wraps(loss_fn)
        def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if self._on_mesh or inside.is_traced((args, kwargs)):
                own = inside.localized(self.collectives, args, argnums)
                value, gradients = jax.value_and_grad(loss_fn, argnums, has_aux)(*own, **kwargs)
                return value, self._average_inside(gradients)
            if not self._syncing:
                return programs.local(*args, **kwargs)
            return self._step(programs, args, kwargs)

        return step

    def average(self, gradients: Any) -> Any:
        """The average of a tree of gradients over all ranks. Every rank must call it.

        For gradients accumulated under ``no_sync``, or computed in another way; sparse ones (BCOO) too.
        """
        if self._on_mesh or inside.is_traced(gradients):
            return self._average_inside(gradients)
        leaves, structure = flatten(gradients)
        plan = self._plan_for(gradients, leaves, structure, None)
        self._reducer.step += 1
        reduction = Reduction(self._reducer, self._thread, plan)
        copies = own_copies(leaves)
        for leaf in plan.order:
            reduction.ready(leaf, copies[leaf])
        averaged = reduction.finish()
        self._note(plan, reduction)
        return jax.tree.unflatten(structure, averaged)

    def average_in(self, ctx: Context | int, rrefs: Sequence[RRef]) -> None:
        """Average the gradients that a context holds of values this worker owns, and put them back into it.

        For replicas that make remote calls: each has a context of its own. Then ``DistributedOptimizer.step(ctx)``.
        Every rank must call it, with as many references, to values alike, in the same order.
        """
        in_context.write(ctx, rrefs, self.average(in_context.read(ctx, rrefs)))

    def reduction(self, like: Any) -> Reduction:
        """Begin a step whose gradients come one by one: ``ready(leaf, gradient)`` in any order; then ``finish()``.

        The gradients are overwritten: hand over arrays that nobody else holds. Every rank must call it.
        """
        if self._on_mesh:
            raise CollectiveError("reduction: on a mesh a step is one compiled program. Use value_and_grad or average.")
        leaves, structure = flatten(like)
        self._reducer.step += 1
        return Reduction(self._reducer, self._thread, self._plan_for(like, leaves, structure, None))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which gradients stay this rank's own. Sum them, and ``average`` the sum.

        A step inside ``jax.jit`` is what it was when it was traced: jit one for the block and one for outside of it.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True) -> Iterator[Join]:
        """A block of steps of which ranks may take different numbers. Every rank must enter it.

        A rank that has run out calls ``finish`` (or leaves the block) and does what the others do, with zeros.

        Arguments:
          divide_by_initial_world_size: divide gradients by the number of all ranks; else by those still active.

        Example:
          >>> with dp.join() as join:
          ...     for batch in batches_of_this_rank:
          ...         loss, gradients = step(params, batch)
          ...         params = update(params, gradients)
          ...     params = join.finish(params)
        """
        if self._on_mesh:
            raise CollectiveError("join: the ranks of a mesh run one program and have equally many inputs. Pad them.")
        join = Join(lambda: self._thread.run(self._reducer.shadow), self.broadcast)
        self._reducer.divide_by_active, self._joining = not divide_by_initial_world_size, True
        try:
            yield join
            join.leave()
        finally:
            self._reducer.divide_by_active = self._joining = False

    def statistics(self) -> Statistics:
        """Sizes and times of the last step on this rank."""
        return self._statistics

    # From Python: in pieces, or whole.

    def _step(self, programs: Programs, args: tuple, kwargs: dict) -> tuple[Any, Any]:
        program = programs.find(
            args, kwargs, lambda traced: self._agree(traced.like, traced.order), overlap=self.overlap
        )
        self._reducer.step += 1
        reduction = Reduction(self._reducer, self._thread, program.plan)
        results = program.run(args, kwargs, reduction.ready)
        averaged = reduction.finish()
        if self.find_unused_parameters:
            used = self._thread.run(self._reducer.share_used, program.used)
            self.used = jax.tree.unflatten(program.structure, list(used))
        self._note(program.plan, reduction)
        return results, jax.tree.unflatten(program.structure, averaged)

    def _plan_for(self, tree: Any, leaves: list[Any], structure: Any, order: Sequence[int] | None) -> Plan:
        key = structure, tuple(map(_kind, leaves))
        if key not in self._trees:
            self._trees[key] = self._agree(tree, order)
        return self._trees[key]

    def _agree(self, tree: Any, order: Sequence[int] | None) -> Plan:
        terms = self._terms(tree)
        return self._thread.run(self._reducer.agree, terms, order)

    def _terms(self, tree: Any) -> Terms:
        leaves = describe(tree)
        require_inexact(leaves, "DataParallel")
        return Terms(tuple(leaves), self._settings)

    def _note(self, plan: Plan, reduction: Reduction) -> None:
        pairs = zip(plan.terms.leaves, jax.tree.leaves(self.used), strict=False)
        unused = [leaf.path for leaf, used in pairs if not used]
        who = self._reducer.collectives
        self._statistics = after_step(self._statistics, plan, reduction.clock, unused, who.rank, who.size)

    # Inside jit and shard_map.

    def buckets(self, tree: Any) -> Sequence[Bucket]:
        """The buckets of a tree. Off a mesh every rank must call it: they agree on them."""
        if self._on_mesh:
            return make_plan(self._terms(tree), None, self._rules).buckets
        leaves, structure = flatten(tree)
        return self._plan_for(tree, leaves, structure, None).buckets

    def initial_states(self, tree: Any) -> list[Any]:
        """The hook's states for the buckets of a tree."""
        hook = self._rules.hook or plain_average()
        return [hook.init(bucket) for bucket in self.buckets(tree)]

    def average_with(self, gradients: Any, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The average of a tree of gradients, and the hook's new states. Pure; every rank must call it."""
        if self._rules.hook is None and not self._on_mesh and not inside.is_traced(gradients):
            return self.average(gradients), list(states)
        buckets, (leaves, structure) = self.buckets(gradients), jax.tree.flatten(gradients)
        hook = self._rules.hook or plain_average()
        averaged, after = inside.average(leaves, buckets, hook, states, self.collectives)
        return jax.tree.unflatten(structure, averaged), after

    def _average_inside(self, gradients: Any) -> Any:
        if not self._syncing:
            return gradients
        if self._joining or self._rules.check_finite:
            raise CollectiveError(
                f"{'join' if self._joining else 'check_finite'}: inside jax.jit (and on a mesh) ranks cannot wait for "
                "each other's word before a bucket is reduced. Call the step from Python, without jax.jit."
            )
        states = self.initial_states(gradients)
        if jax.tree.leaves(states):
            raise HookError(
                f"the hook {self._settings[1][1]!r} has a state, and a step inside jit has nowhere to keep it. Use "
                "average_gradients(hook=...), whose state is the optimizer's, or call the step from Python."
            )
        return self.average_with(gradients, states)[0]


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, is_sparse(leaf)) if hasattr(leaf, "dtype") else type(leaf)
