"""A loss, traced for the shapes it was called with, and compiled by whoever drives its steps."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jdistgrad._compat import trace_context
from jdistgrad.data_parallel.buckets.leaves import Leaf, describe, require_inexact
from jdistgrad.data_parallel.collectives.spanning import Span
from jdistgrad.data_parallel.reducing.settings import BucketPlan
from jdistgrad.data_parallel.steps import trace
from jdistgrad.data_parallel.steps.segments import Segmented
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.functions import Args, Kwargs
from jdistgrad.rpc.references.handles import without_handles

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LossProgram:
    """A compiled step, in segments.

    Attributes:
      structure: that of the gradients.
      used: for each leaf of the gradients, whether the loss depends on it.
      results: the structure of the value, and aux if any.
    """

    plan: BucketPlan
    structure: Any
    used: tuple[bool, ...]
    staged: Segmented
    results: Any

    @classmethod
    def segmented(cls, traced: trace.Trace, plan: BucketPlan, *, overlap: bool) -> "LossProgram":
        """Compile a step. ``overlap``: in a segment for each bucket."""
        groups = [[slot.index for slot in bucket.slots] for bucket in plan.buckets]
        staged = Segmented(traced.closed, groups if overlap and groups else [plan.bucketed])
        return cls(plan, traced.gradients, traced.used, staged, traced.results)

    def run(self, args: Args, kwargs: Kwargs, computed: Callable[[list[jax.Array]], None]) -> Any:
        """Dispatch the step, with gradients in the order of the plan's buckets; return the value, and aux if any."""
        return jax.tree.unflatten(self.results, self.staged(without_handles(jax.tree.leaves((args, kwargs))), computed))


class Programs:
    """The compiled steps of one loss, by their kind and the shapes of the loss's arguments."""

    def __init__(self, loss: Callable[..., Any], argnums: int | Sequence[int], *, has_aux: bool):
        self._loss, self._has_aux = loss, has_aux
        self._argnums = (
            tuple(map(operator.index, argnums)) if isinstance(argnums, Sequence) else operator.index(argnums)
        )
        self._found: dict[Any, Any] = {}
        self.local = jax.jit(jax.value_and_grad(loss, argnums, has_aux))

    def find(
        self, args: Args, kwargs: Kwargs, kind: Any, make: Callable[[trace.Trace], T], span: Span | None = None
    ) -> T:
        """Return what ``make`` makes of the traced step: the same for the same kind and shapes.

        Arguments:
          span: the devices that the step's collectives reach; None: this rank's only.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = tree, kind, trace_context(), tuple(map(jax.typeof, leaves))
        if key not in self._found:
            self._found[key] = make(self._trace(args, kwargs, span))
        found: T = self._found[key]
        return found

    def usage(self, args: Args, kwargs: Kwargs) -> tuple[Any, tuple[bool, ...]]:
        """Return the structure of the gradients, and for each leaf whether the loss depends on it."""
        return self.find(args, kwargs, "usage", lambda traced: (traced.gradients, traced.used))

    def _trace(self, args: Args, kwargs: Kwargs, span: Span | None) -> trace.Trace:
        self._require_inexact(args)
        with span.tracing() if span is not None else contextlib.nullcontext():
            axes = span.axes if span is not None else ()
            traced = trace.trace(self._loss, self._argnums, args, kwargs, has_aux=self._has_aux, axes=axes)
        if any(isinstance(value, jax.core.Tracer) for value in traced.closed.consts):
            raise CollectiveError(
                "value_and_grad: the loss closes over a value that jax.grad or jax.vmap is tracing around this step. "
                "Pass it as an argument of the step."
            )
        return traced

    def _require_inexact(self, args: Args) -> None:
        numbers = self._argnums
        if max((numbers,) if isinstance(numbers, int) else numbers, default=0) >= len(args):
            raise TypeError(
                f"value_and_grad: argnums={numbers!r} names positional arguments, of which there are {len(args)}"
            )
        chosen = args[numbers] if isinstance(numbers, int) else [args[k] for k in numbers]
        leaves: list[Leaf] = describe(chosen)
        require_inexact(leaves, "value_and_grad")
