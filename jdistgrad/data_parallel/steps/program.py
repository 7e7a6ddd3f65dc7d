"""A loss, traced and compiled for the shapes it was called with."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdistgrad.data_parallel.buckets.leaves import Leaf, describe, require_inexact
from jdistgrad.data_parallel.buckets.planning import Cap
from jdistgrad.data_parallel.reducing.settings import BucketPlan
from jdistgrad.data_parallel.steps import trace
from jdistgrad.data_parallel.steps.segments import Segmented
from jdistgrad.data_parallel.steps.thread import settings
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.functions import Args, Kwargs


@dataclasses.dataclass(frozen=True)
class Traced:
    """The facts of a traced step before it is compiled: the gradients' tree, and the order they become ready in."""

    like: Any
    order: list[int]


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A compiled step."""

    plan: BucketPlan
    structure: Any
    used: tuple[bool, ...]
    staged: Segmented
    results: Any

    def run(self, args: Args, kwargs: Kwargs, computed: Callable[[list[jax.Array]], None]) -> Any:
        """Dispatch the step, with gradients in the order of the plan's buckets; return the value, and aux if any."""
        return jax.tree.unflatten(self.results, self.staged(jax.tree.leaves((args, kwargs)), computed))


class Programs:
    """The compiled steps of one loss, by the shapes of its arguments."""

    def __init__(self, loss: Callable[..., Any], argnums: int | Sequence[int], *, has_aux: bool):
        self._loss, self._has_aux = loss, has_aux
        self._argnums = (
            tuple(map(operator.index, argnums)) if isinstance(argnums, Sequence) else operator.index(argnums)
        )
        self._found: dict[Any, LossProgram] = {}
        self._usage: dict[Any, tuple[Any, tuple[bool, ...]]] = {}
        self.local = jax.jit(jax.value_and_grad(loss, argnums, has_aux))

    def find(
        self, args: Args, kwargs: Kwargs, agree: Callable[[Traced], BucketPlan], cap: Cap, *, overlap: bool
    ) -> LossProgram:
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, overlap, cap, settings(), tuple(map(jax.typeof, leaves))
        if key not in self._found:
            self._found[key] = self._make(self._trace(args, kwargs), agree, overlap=overlap)
        return self._found[key]

    def usage(self, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[bool, ...]]:
        """Return the structure of the gradients, and for each leaf whether the loss depends on it."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, settings(), tuple(map(jax.typeof, leaves))
        if key not in self._usage:
            traced = self._trace(args, kwargs)
            self._usage[key] = traced.gradients, traced.used
        return self._usage[key]

    def _trace(self, args: Args, kwargs: Kwargs) -> trace.Trace:
        self._require_inexact(args)
        traced = trace.trace(self._loss, self._argnums, args, kwargs, has_aux=self._has_aux)
        if any(isinstance(value, jax.core.Tracer) for value in traced.closed.consts):
            raise CollectiveError(
                "value_and_grad: the loss closes over a value that jax.grad or jax.vmap is tracing around this step. "
                "Pass it as an argument of the step."
            )
        return traced

    def _make(self, traced: trace.Trace, agree: Callable[[Traced], BucketPlan], *, overlap: bool) -> LossProgram:
        count = traced.gradients.num_leaves
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.closed.out_avals[:count]]
        like = jax.tree.unflatten(traced.gradients, avals)
        plan = agree(Traced(like, trace.readiness(traced.closed, count)))
        groups = [[slot.index for slot in bucket.slots] for bucket in plan.buckets]
        staged = Segmented(traced.closed, groups if overlap and groups else [plan.bucketed])
        return LossProgram(plan, traced.gradients, traced.used, staged, traced.results)

    def _require_inexact(self, args: Args) -> None:
        numbers = self._argnums
        if max((numbers,) if isinstance(numbers, int) else numbers, default=0) >= len(args):
            raise TypeError(
                f"value_and_grad: argnums={numbers!r} names positional arguments, of which there are {len(args)}"
            )
        chosen = args[numbers] if isinstance(numbers, int) else [args[k] for k in numbers]
        leaves: list[Leaf] = describe(chosen)
        require_inexact(leaves, "value_and_grad")
