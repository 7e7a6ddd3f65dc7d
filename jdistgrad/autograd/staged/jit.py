"""The staged step: traced once, local pieces compiled, pieces and messages run as a dataflow from Python."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np

from jdistgrad._compat import lowered, static_arguments, trace_context, trace_state_clean
from jdistgrad.autograd.contexts import some_context
from jdistgrad.autograd.gradients import RemoteGradient, hold
from jdistgrad.autograd.operations.uses import kept
from jdistgrad.autograd.staged.equations import flatten
from jdistgrad.autograd.staged.plan import StepPlan, cut
from jdistgrad.autograd.staged.rewriting import refuse_inner_uses
from jdistgrad.autograd.staged.running import Prepared, StepRun
from jdistgrad.autograd.values.holes import can_be_traced
from jdistgrad.autograd.values.primitive import operations_in
from jdistgrad.errors import ContextError
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.handles import Handle, is_handle, without_handles
from jdistgrad.rpc.worker import Worker, find_worker

P = ParamSpec("P")
T = TypeVar("T")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A static argument: a part of the structure of the arguments, without leaves."""

    value: Any


def jit(
    fun: Callable[P, T],
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
) -> "StagedFunction[P, T]":
    """Stage a function that calls other workers, as ``jax.jit`` compiles a local one: the fast way to run a step.

    The function is traced once for each structure and shape of its arguments (and, as by ``jax.jit``, for each setting
    of JAX's options, such as the precision of products) and cut at the wire. Calls whose inputs
    are ready go out together, local pieces (each compiled by ``jax.jit``) run while messages are under way, and errors
    and Ctrl-C arrive as ordinary exceptions. Nothing waits for more than it needs: a reference is passed on before its
    value has been made, and a pullback is requested before its call has been answered, if the cotangent is known. Calls
    of jitted functions on one worker that follow each other with nothing between, and their pullbacks, go in one
    message, whose timeout is the sum of theirs; arrays that pass from one to the next never travel. Like ``jax.jit``,
    staging may drop calls whose results are unused.

    Inside ``scan``, ``while_loop`` and ``cond`` a remote call is a host callback, as in ``jax.jit``.

    Arguments:
      fun: a pure function of arrays, pytrees and RRefs; usually a ``jdistgrad.value_and_grad(...)``.
      static_argnums, static_argnames: as for ``jax.jit``. There is no ``donate_argnums``: an argument may be on its way
        in a message when the next piece runs.

    Returns:
      The staged function; ``.plan(*args)`` shows its pieces.

    Example:
      >>> step = jd.jit(jd.value_and_grad(loss_fn, argnums=(0, 1)))
      >>> with jd.context() as ctx:
      ...     loss, (enc_grad, head_grad) = step(enc, head, x, y)
      ...     optimizer.step(ctx)
    """
    if not callable(fun):
        raise TypeError(f"jdistgrad.jit takes a function, not {fun!r:.60}")
    if static_argnums is None and static_argnames is None:
        return StagedFunction(fun)
    return StagedFunction(
        fun, *static_arguments(jax.jit(fun, static_argnums=static_argnums, static_argnames=static_argnames))
    )


class StagedFunction(Generic[P, T]):
    """The result of ``jit``: a function that is traced and cut for each kind of arguments."""

    def __init__(self, fun: Callable[P, T], static_argnums: Iterable[int] = (), static_argnames: Iterable[str] = ()):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._static_argnums, self._static_argnames = frozenset(static_argnums), frozenset(static_argnames)
        self._steps: dict[Any, TracedStep] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not trace_state_clean():
            return self._fun(*args, **kwargs)
        leaves, structure = self._flatten(args, kwargs)
        result: T = self._step(leaves, structure).run(without_handles(leaves))
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function as a method, as Python and ``jax.jit`` do: its first argument is the object."""
        return self if instance is None else types.MethodType(self, instance)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> StepPlan:
        """Return the plan of the step for arguments like these; ``print(plan)`` shows its pieces and messages."""
        leaves, structure = self._flatten(args, kwargs)
        return self._step(leaves, structure).plan

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Flatten the arguments. Static ones become a part of the structure."""
        if self._static_argnums or self._static_argnames:
            numbers = {one % len(args) for one in self._static_argnums if -len(args) <= one < len(args)}
            args = tuple(Static(one) if k in numbers else one for k, one in enumerate(args))
            kwargs = {name: Static(one) if name in self._static_argnames else one for name, one in kwargs.items()}
        return jax.tree.flatten((args, kwargs))

    def _step(self, leaves: list[Any], structure: Any) -> "TracedStep":
        worker = find_worker()
        key = (structure, None if worker is None else (worker.world, worker.rank), trace_context(), *map(_kind, leaves))
        step = self._steps.get(key)
        if step is None:
            for old, one in list(self._steps.items()):  # other threads may add some
                if one.ended:  # references of closed worlds are no longer valid
                    self._steps.pop(old, None)
            step = self._steps[key] = TracedStep(self._fun, leaves, structure, worker)
        return step


class TracedStep:
    """A function traced and cut for arguments of one kind."""

    def __init__(self, fun: Callable[..., Any], leaves: Sequence[Any], structure: Any, worker: Worker | None):
        self._worker = None if worker is None else weakref.ref(worker)

        def flat(*leaves: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            args = [one.value if isinstance(one, Static) else one for one in args]
            kwargs = {name: one.value if isinstance(one, Static) else one for name, one in kwargs.items()}
            found, self._result = jax.tree.flatten(fun(*args, **kwargs))
            for leaf in found:
                if not is_handle(leaf) and not can_be_traced(leaf):
                    raise TypeError(
                        f"jdistgrad.jit: {describe(fun)} returned a {type(leaf).__name__}: {leaf!r:.60}. Results must "
                        "be arrays, numbers, RRefs and containers of them."
                    )
            self._handles = {k: jax.typeof(leaf) for k, leaf in enumerate(found) if is_handle(leaf)}
            return found

        with kept() as self._uses:
            traced = jax.make_jaxpr(flat)(*leaves)
            refuse_inner_uses(flatten(traced)[0])  # lowering may drop what a body does not return
            self.plan = cut(lowered(traced, whole=True), [one for one, _ in self._uses])
        self._prepared = Prepared(self.plan)
        arguments = jax.tree.leaves(
            jax.tree.unflatten(structure, leaves), is_leaf=lambda one: isinstance(one, RemoteGradient)
        )
        self._takes_gradients = any(isinstance(one, RemoteGradient) for one in arguments)
        inner = operations_in(one.eqn for unit in self.plan.units for one in unit.equations if one.eqn is not None)
        self._records = any(one.needs_context for one in (*self.plan.operations, *inner))

    @property
    def ended(self) -> bool:
        """Return whether the world that the step was traced in has been closed."""
        if self._worker is None:
            return False
        worker = self._worker()
        return worker is None or worker.closed

    def run(self, leaves: Sequence[Any]) -> Any:
        """Return the function's result, given the leaves of its arguments, with marks in place of handles."""
        with some_context(needed=self._records) as lease:
            if lease is not None and self._takes_gradients:
                raise ContextError(
                    "jdistgrad.jit: an argument is a gradient of a reference, which belongs to the context that it was "
                    "made in. Open a context around both: with jd.context()."
                )
            outputs = StepRun(self._prepared, leaves).outputs()
            for k, kind in self._handles.items():
                outputs[k] = kind.raise_val(outputs[k])
            return hold(jax.tree.unflatten(self._result, outputs), lease)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)  # random keys have no weak type
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    if isinstance(leaf, Handle):
        return type(leaf), np.shape(leaf.marks)
    raise TypeError(
        f"jdistgrad.jit: an argument (or a leaf of one) is a {type(leaf).__name__}: {leaf!r:.60}. Arguments must be "
        "arrays, numbers, RRefs and containers of them; close over anything else."
    )
