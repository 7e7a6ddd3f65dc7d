"""DataParallel: the same model on every rank, with averaged gradients."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.contributions import gradient_tree
from jdistgrad.autograd.callee.functions import own_parts
from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.autograd.tape.ledger import REFERENCE, Target
from jdistgrad.autograd.tape.tape import Tape
from jdistgrad.autograd.values.holes import is_float_array
from jdistgrad.collectives.base import Collectives, require_collectives
from jdistgrad.collectives.default import of_this_world
from jdistgrad.collectives.descriptions import (
    enclosed,
    has_functions,
    is_elsewhere,
    on_opened,
    opened,
    refuse_elsewhere,
    refuse_sparse,
    removed,
)
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.collectives.host_arrays import any_traced, on_numbers, refuse_keys
from jdistgrad.collectives.roll_call import Joining
from jdistgrad.corrections import Corrected
from jdistgrad.data_parallel.agreement import Rules
from jdistgrad.data_parallel.buckets import Cap
from jdistgrad.data_parallel.compiled import CompiledAverage, localized
from jdistgrad.data_parallel.driver import Driver, Join
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.overlapped import Reduction
from jdistgrad.data_parallel.segments import StepPrograms
from jdistgrad.data_parallel.statistics import Statistics
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.rref import RRef

P = ParamSpec("P")
V = TypeVar("V")
A = TypeVar("A")
Tree = TypeVar("Tree")


class DataParallel(Corrected):
    """Gradient averaging over all ranks, bucket by bucket, while the backward pass still runs.

    Every rank must make a ``DataParallel`` with the same settings, and take the same steps with it.

    Arguments:
      collectives: the ranks that average; default all workers of this world.
      bucket_cap_mb: how many MiB of gradients travel together; default 25, and 1 for the first bucket.
      find_unused_parameters: after each step, determine which parameters no rank's loss depends on (``used``).
      hook: processes a bucket instead of averaging it; see ``hooks``. Trees of the same paths, shapes and dtypes share
        the hook's state: two such models need a ``DataParallel`` each.
      overlap: cut the backward pass so that the first buckets are reduced while the rest still runs. Results are the
        same without. Default: on accelerators, between machines, or with a spare core for each rank.
      sparse: paths of leaves, as error messages spell them (``['embedding']``), with gradients whose rows are mostly
        zero: only the other rows travel.
      check_finite: look for NaN and infinity before each reduction; the error names the rank and the leaf.
      check_parameters: compare the bits of the parameters in the first step that is called from Python; the error
        names the leaf and the ranks. PyTorch's DDP broadcasts parameters; here you call ``broadcast``.
      timeout: seconds to wait for the slowest rank; over ``Devices`` also the longest time of one program.
      check: whether the ranks of a compiled step meet once before its averages. Without the meeting a rank that runs
        another program, or none, looks like a slow rank: the sums may be wrong, or all ranks wait for ever.

    Make one for the whole program: each has a thread and, over MPI, a communicator of its own.

    Example:
      >>> dp = jd.DataParallel()
      >>> params = dp.broadcast(params)
      >>> step = dp.value_and_grad(loss)
      >>> value, gradients = step(params, batch_of_this_rank)
    """

    corrections: ClassVar = {
        "module": "the model is a function; dp.value_and_grad(loss) takes its loss",
        "parameters": "parameters are a pytree of yours; dp.broadcast(params) makes them the same on all ranks",
        "register_comm_hook": "DataParallel(hook=...) takes a hook of jd.hooks",
    } | {
        name: f"its collectives have it: dp.collectives.{name.replace('_', '')}"
        for name in ("all_reduce", "all_gather", "allreduce", "allgather", "barrier", "rank")
    }

    def __init__(
        self,
        collectives: Collectives | None = None,
        *,
        bucket_cap_mb: Cap = None,
        find_unused_parameters: bool = False,
        hook: Hook | None = None,
        overlap: bool | None = None,
        sparse: Sequence[str] = (),
        check_finite: bool = False,
        check_parameters: bool = True,
        timeout: float = 300.0,
        check: bool = True,
    ):
        self._rules = rules = Rules(
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            hook=hook,
            sparse=sparse,
            check_finite=check_finite,
            check_parameters=check_parameters,
            timeout=timeout,
        )
        self.collectives = of_this_world(timeout=timeout) if collectives is None else collectives
        remedy = "DataParallel takes no model: dp.value_and_grad(loss) takes the loss, a function of the parameters."
        require_collectives("DataParallel", self.collectives, remedy)
        has_room = self.collectives.has_room or jax.default_backend() != "cpu"
        self.overlap = has_room if overlap is None else overlap
        self._syncing = True
        self._driver: Driver | None = None
        self._of_programs = self.collectives  # with this object's settings, for compiled steps
        if isinstance(self.collectives, HostCollectives):
            self._driver = Driver(self.collectives, rules)
            meets = check and self.collectives.meets_in_programs
            self._of_programs = self.collectives.adjusted(timeout=timeout, meets_in_programs=meets)
        self._compiled_average = CompiledAverage(self._of_programs, rules, self._driver)

    def __repr__(self) -> str:
        set_ = {"hook": self._rules.hook, "find_unused_parameters": self._rules.find_unused_parameters or None}
        shown = "".join(f", {name}={value!r}" for name, value in set_.items() if value is not None)
        return f"DataParallel({self.collectives!r}, bucket_cap_mb={self._rules.bucket_cap_mb or 25}{shown})"

    @property
    def size(self) -> int:
        """The number of ranks, without lost ones."""
        return self._driver.reducer.collectives.size if self._driver else self.collectives.size

    # The model.

    def broadcast(self, tree: Tree, root: int = 0) -> Tree:
        """Return the root's tree: parameters, batch statistics, any tree of arrays. Every rank must call it.

        Functions among the leaves, as in an equinox module, stay this rank's own.
        """
        if has_functions(tree):
            mine: Tree = opened(self.broadcast(enclosed(tree), root))
            return mine
        driver = self._driver_of(tree)
        if driver is None:
            found: Tree = jax.tree.map(lambda leaf: on_numbers(self.collectives.broadcast, leaf, root), tree)
        else:
            found = driver.broadcast(tree, self.collectives._checked_root(root))
        return found

    def verify(self, tree: Any) -> None:
        """Check that a tree is the same on every rank, bit for bit. Every rank must call it.

        Raises:
          DisagreementError: a leaf differs; the error names the leaf, the place in it, the rank and both values.
        """
        driver = self._require_driver(
            "verify: the ranks of a mesh run one program on one array, so there is nothing to compare."
        )
        driver.verify(enclosed(tree))

    @property
    def used(self) -> Any:
        """The tree of the last average, with False for each leaf that no rank's loss depends on.

        Steps under ``no_sync`` since the previous average count too, also if that ended because gradients were not
        finite. None without ``find_unused_parameters``, which compiled steps refuse.
        """
        return self._driver.used if self._driver else None

    # Steps.

    @overload
    def value_and_grad(
        self, loss_fn: Callable[P, tuple[V, A]], argnums: int | Sequence[int] = 0, *, has_aux: Literal[True]
    ) -> Callable[P, tuple[tuple[V, A], Any]]: ...

    @overload
    def value_and_grad(
        self,
        loss_fn: Callable[P, V],
        argnums: int | Sequence[int] = 0,
        has_aux: Literal[False] = False,  # noqa: FBT002 as in jax.value_and_grad
    ) -> Callable[P, tuple[V, Any]]: ...

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,  # noqa: FBT001, FBT002 as in jax.value_and_grad
    ) -> Callable[..., Any]:
        """Return ``jax.value_and_grad`` of a loss, with gradients averaged over all ranks; the value is this rank's.

        The loss must be fit for ``jax.jit``: the function that is returned traces it once for each shape of its
        arguments, so make that function once, before the loop over steps. Inside ``jax.jit`` or
        ``jax.shard_map`` the step becomes part of the compiled program. Called from Python, the backward pass is cut
        into segments, and buckets travel while later segments run. Every rank must call the returned function equally
        often. Functions among the leaves of arguments are passed on; their gradients are None.
        """
        plain, enclosing = (StepPrograms(one, argnums, has_aux=has_aux) for one in (loss_fn, on_opened(loss_fn)))

        @functools.wraps(loss_fn)
        def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not has_functions((args, kwargs)):
                return self._step(plain, args, kwargs)
            args, kwargs = enclosed((args, kwargs))
            value, gradients = self._step(enclosing, args, kwargs)
            return opened(value), removed(gradients)

        return step

    def _step(self, programs: StepPrograms, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        driver = self._driver_of((args, kwargs))
        if driver is None:
            value, gradients = programs.differentiated(*localized(self.collectives, args, programs.argnums), **kwargs)
            self._rules.require_sparse_paths(gradients)
            return value, self._compiled_average.average(gradients, "step") if self._syncing else gradients
        if not self._syncing:
            return driver.local_step(programs, args, kwargs)
        return driver.step(programs, args, kwargs, overlap=self.overlap)

    def jit(self, function: Callable[P, V], *, donate_argnums: int | Sequence[int] = ()) -> Callable[P, V]:
        """Return ``jax.jit`` of a function that may take steps of this object and use its collectives.

        Over ``Devices`` it becomes one program over the devices of all ranks, with XLA's collectives; ``jax.jit``
        itself compiles for this rank's device only, and averages in host memory. Every rank must call it equally often,
        with arguments of the same shapes. A rank's own number in the program, such as ``jd.rank()``, is an error: pass
        it as an argument. A program that runs longer than ``timeout`` counts as hanging, and ends the job.

        Example:
          >>> @dp.jit
          ... def step(params, batch):
          ...     value, gradients = dp.value_and_grad(loss)(params, batch)
          ...     return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        """
        compiled: Callable[P, V] = self._of_programs.jit(function, donate_argnums=donate_argnums)
        return compiled

    def average(self, gradients: Tree) -> Tree:
        """Return the average of a tree of gradients over all ranks. Every rank must call it.

        For gradients accumulated under ``no_sync``, or computed in another way; sparse gradients (BCOO) too.
        """
        driver = self._driver_of(gradients)
        averages: Tree = (driver or self._compiled_average).average(gradients)
        return averages

    def mean(self, metrics: Tree) -> Tree:
        """Return the means over all ranks of a tree of numbers and arrays, such as metrics. Every rank must call it.

        Unlike ``average`` it takes integers, too, and uses neither buckets nor hooks.

        Example:
          >>> shown = dp.mean({"loss": 0.5, "correct": 12})
        """
        refuse_sparse(metrics, "mean")
        found = jax.tree_util.tree_map_with_path(_as_float, metrics, is_leaf=is_elsewhere)
        driver = self._driver_of(metrics)
        votes = driver is not None and driver.reducer.votes
        means: Tree = driver.mean(found) if driver and votes else self.collectives.allreduce(found, "mean")
        return means

    def average_in(self, ctx: Context | int, rrefs: Sequence[RRef[Any]]) -> None:
        """Average the gradients that a context holds for values of this worker, and write the averages back into it.

        For replicas that make remote calls: each has a context of its own. ``DistributedOptimizer.step(ctx)`` follows.
        Every rank must call it, with references to values of the same structure, in the same order.
        """
        tape = find_context(ctx).tape
        found = [_gradient(rref, tape) for rref in rrefs]
        for rref, gradient in zip(rrefs, self.average(found), strict=True):
            own, new = own_parts(rref.local_value()), iter(jax.tree.leaves(gradient))
            before = tape.gradient(rref.id) or [None] * len(own)
            parts = [next(new) if mine else one for mine, one in zip(own, before, strict=True)]
            tape.ledger.write(Target(REFERENCE, rref.id), parts)

    def reduction(self, like: Any) -> Reduction:
        """Begin a step whose gradients come one by one: ``ready(leaf, gradient)`` in any order; then ``finish()``.

        ``leaf`` is the gradient's place in ``jax.tree.leaves(like)``; ``finish`` returns the averages in that order.
        The gradients are overwritten: hand over arrays that nobody else holds. Every rank must call it. The step does
        not count in ``used`` and ``statistics``.
        """
        remedy = "reduction: on a mesh a step is one compiled program. Use value_and_grad or average."
        return self._require_driver(remedy).reduction(like)

    def abandon(self) -> None:
        """Skip this rank's next step after a failure before it; return at once.

        The other ranks' step raises a ``DisagreementError`` that names this rank, instead of waiting for it.
        """
        self._require_driver("abandon: on a mesh one program takes the step of all ranks, or none.").abandon()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Open a block in which gradients stay this rank's own. Every rank must enter it, and ``average`` their sum.

        A step inside ``jax.jit`` stays as it was traced: jit one step for the block and another for outside.
        """
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True) -> Iterator[Join]:
        """Open a block of steps of which ranks may take different numbers. Every rank must enter it.

        A rank without further inputs calls ``finish`` (or leaves the block) and shadows the others with zeros. A rank
        can shadow only steps and averages that are called from Python. Steps inside ``jax.jit``, and your own
        collectives, in the loss (``SyncBatchNorm``) or outside, wait for that rank until their ``timeout``, and raise
        an error that names it.

        Arguments:
          divide_by_initial_world_size: divide gradients by the number of all ranks, not only of the active ranks. Must
            be the same on every rank.

        Raises:
          DisagreementError: some ranks are in no such block, or divide differently; in the first step, on every rank.

        Example:
          >>> with dp.join() as join:
          ...     for batch in batches_of_this_rank:
          ...         loss, gradients = step(params, batch)
          ...         params = update(params, gradients)
          ...     params = join.finish(params)
        """
        remedy = "join: the ranks of a mesh run one program and have equally many inputs. Pad them."
        joining = Joining.BY_ALL if divide_by_initial_world_size else Joining.BY_ACTIVE
        with self._require_driver(remedy).join(joining) as join:
            yield join

    def statistics(self) -> Statistics:
        """Return sizes and times of the last step on this rank."""
        return self._driver.statistics if self._driver else Statistics()

    # The driver, or compiled code.

    def _driver_of(self, tree: Any) -> Driver | None:
        """Return the driver; None on a mesh and for a traced tree."""
        return None if any_traced(tree) else self._driver

    def _require_driver(self, otherwise: str) -> Driver:
        if self._driver is None:
            raise CollectiveError(otherwise)
        return self._driver


def _as_float(path: Any, number: Any) -> jax.Array:
    refuse_elsewhere(path, number)
    refuse_keys(number)
    found = number if isinstance(number, jax.Array) else np.asarray(number)  # JAX's integers may be too narrow
    return jnp.asarray(found if jnp.issubdtype(found.dtype, jnp.inexact) else found.astype(jnp.result_type(float)))


def _gradient(rref: RRef[Any], tape: Tape) -> Any:
    """Return a value's gradient, with None in place of leaves without derivative and of references."""
    rref.local_value()  # raises where the value is not
    whole = gradient_tree(rref.id, tape.gradient(rref.id))
    return trees.map_leaves(lambda leaf: leaf if is_float_array(leaf) else None, whole)
