"""The optimizer of parameters on other workers: one optax state on each owner, one step for all."""

import collections
import concurrent.futures
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.autograd.operations.uses import use, use_all
from jdistgrad.corrections import Corrected
from jdistgrad.errors import ContextError, DifferentiationError
from jdistgrad.optim import owner
from jdistgrad.optim.sharding import with_extra_arguments
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import RRef, by_reference, references_kept
from jdistgrad.rpc.worker import current_worker


class DistributedOptimizer(Corrected):
    """An optimizer that applies an optax transformation to values on their owners.

    Each owner keeps one state for all its values. ``step`` updates all owners at once, each under a lock, so trainers
    with contexts of their own may share parameters (each with an optimizer of its own, or one passed on to it). A local
    value takes part as ``jdistgrad.RRef(value)``.

    In a function staged by ``jit``, ``step(gradients)`` of an owner goes in the message of its last pullback.

    Arguments:
      tx: any optax transformation. Each owner applies it to the list of its own values: a mask or labels
        (``optax.masked``, ``optax.partition``) are a function of that list, or a list too. To clip by a norm over all
        values, use ``max_global_norm``.
      rrefs: the values to optimize. Leaves that are not float arrays stay as they are.
      max_global_norm: scale gradients down so that their norm, over all owners, is at most this. None, or ``math.inf``:
        any norm.
      refuse_nan: if a gradient is not finite, raise an error and change nothing on any owner.

    Example:
      >>> optimizer = jd.DistributedOptimizer(optax.adam(1e-3), [enc, dec])
      >>> @jd.jit
      ... def train(enc, dec, x):
      ...     loss, gradients = jd.value_and_grad(loss_fn, argnums=(0, 1))(enc, dec, x)
      ...     optimizer.step(gradients)
      ...     return loss
    """

    corrections: ClassVar = {
        "zero_grad": "gradients belong to a context, and each step has a new one: there is nothing to reset",
        "state_dict": "state() returns values and optimizer states",
        "load_state_dict": "restore(state) takes the result of state()",
    }

    def __init__(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps,
        rrefs: Sequence[RRef[Any]],
        *,
        max_global_norm: float | None = None,
        refuse_nan: bool = False,
        **settings: Never,
    ):
        tx = with_extra_arguments(tx) if isinstance(tx, optax.MultiSteps) else tx
        if settings or not isinstance(tx, optax.GradientTransformation):
            given = ", ".join(map(repr, settings.values())) or "..."
            raise TypeError(
                "DistributedOptimizer needs an optax transformation with its settings, like optax.adam(1e-3), not the "
                f"function that makes one: {getattr(tx, '__name__', tx)}({given})"
            )
        if max_global_norm is not None and not max_global_norm > 0:
            raise ValueError(f"max_global_norm must be positive, not {max_global_norm!r}")
        self._rrefs = _checked(rrefs)
        self._max_norm = None if max_global_norm == math.inf else max_global_norm
        self._refuse_nan = refuse_nan
        numbers: dict[int, list[int]] = collections.defaultdict(list)
        for number, rref in enumerate(self._rrefs):
            numbers[rref.owner.rank].append(number)
        self._on_owners: list[tuple[RRef[owner.OwnedParameters], list[int]]] = [
            (api.remote(rank, owner.OwnedParameters, (tx, [by_reference(self._rrefs[k]) for k in mine])), mine)
            for rank, mine in numbers.items()
        ]
        _all([owned.creation() for owned, _ in self._on_owners])
        self._owners = tuple(str(owned.owner) for owned, _ in self._on_owners)
        self._spelled_numbers = [", ".join(map(str, mine)) for mine in numbers.values()]

    def step(self, gradients: Any = None, **extra: Any) -> None:
        """Update every value with its gradient; return when all owners are done.

        Arguments:
          gradients: a context or its id, for all gradients accumulated there; or the result of ``grad``,
            ``value_and_grad`` or ``backward``: a tree of RemoteGradients. Those of other references are ignored.
          extra: extra arguments of the transformation, on every owner: ``value=loss`` for
            ``optax.contrib.reduce_on_plateau``.

        In a function staged by ``jit``, every owner steps as soon as its gradients are complete; with
        ``max_global_norm`` or ``refuse_nan``, once all owners have inspected theirs. Gradients accumulate in a context,
        and stay there after a step: open a context for each step, or none.

        Raises:
          DifferentiationError: a value has no gradient, or a gradient that is not finite; nothing was changed (but if
            a staged step is running, other owners may have stepped).
          ContextError: the context is closed, or unknown here.
          StaleReferenceError: the optimizer was made in a world that has been shut down.
        """
        self._require_its_world("optimizer.step")
        arrays = {name: jnp.asarray(value) for name, value in extra.items()}
        if not isinstance(gradients, Context | contextlib.AbstractContextManager | int):
            self._step_with(gradients, arrays)
            return
        if not trace_state_clean():
            raise DifferentiationError(
                "optimizer.step(ctx) inside a transformation of JAX's would run while it is traced, not with it. In a "
                "function staged by jd.jit, step with what value_and_grad returned: optimizer.step(gradients)."
            )
        with within(find_context(gradients).scope):
            scale = 1.0
            if self._max_norm is not None or self._refuse_nan:
                inspected = np.stack(self._everywhere("inspect"))
                if self._refuse_nan:
                    owner.require_finite(self._owners, inspected[:, 1].tolist())
                scale = float(self._factor(inspected[:, 0], np))
            elif len(self._on_owners) > 1:  # a single owner checks in its step
                self._everywhere("wait_for")
            self._everywhere("step", scale, arrays)

    def state(self) -> dict[str, Any]:
        """Return values and optimizer states as a pytree that can be saved: ``{"values": [...], "states": [...]}``.

        A third part, ``"owned"``, holds no arrays: its keys say which values each owner has.
        """
        self._require_its_world("optimizer.state")
        there = owner.OwnedParameters.state
        found = _all([api.rpc_async(owned.owner, there, (owned,)) for owned, _ in self._on_owners])
        values: list[Any] = [None] * len(self._rrefs)
        for (_, mine), (here, _) in zip(self._on_owners, found, strict=True):
            for number, value in zip(mine, here, strict=True):
                values[number] = value
        owned = dict.fromkeys(self._spelled_numbers)
        return {"values": values, "states": [state for _, state in found], "owned": owned}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``, for the same values, divided among owners in the same way.

        The arrays may be NumPy's. All owners check their parts before the first restores its own. If values have moved
        to other owners, use ``save`` and ``jdistgrad.restore``.

        Raises:
          ValueError: the state has another structure, other shapes or dtypes, or values divided in another way among
            owners; nothing was restored on any owner.
        """
        self._require_its_world("optimizer.restore")
        parts = zip(self._on_owners, references_kept(self._parts(state)), strict=True)
        there = owner.OwnedParameters
        prepared = [(owned, api.remote(owned.owner, there.prepare, (owned, part))) for (owned, _), part in parts]
        _all([part.creation() for _, part in prepared])
        _all([api.rpc_async(owned.owner, there.put_back, (owned, part)) for owned, part in prepared])

    def _require_its_world(self, what: str) -> None:
        """Raise StaleReferenceError in another world, where these references' ids may mean other values."""
        for rref in self._rrefs:
            rref._home(what)

    def _parts(self, state: Any) -> list[owner.Saved]:
        if not isinstance(state, Mapping) or not {"values", "states"} <= set(state):
            raise ValueError("restore takes the result of state(), a dict with 'values' and 'states'")
        values, states, owned = state["values"], state["states"], state.get("owned") or self._spelled_numbers
        if len(values) != len(self._rrefs) or len(states) != len(self._on_owners):
            here = f"{len(self._rrefs)} on {len(self._on_owners)}"
            raise ValueError(f"restore: {len(values)} values on {len(states)} owners, but this optimizer has {here}")
        if set(owned) != set(self._spelled_numbers):
            raise ValueError(
                f"restore: the state was saved for values divided among owners as ({'), ('.join(owned)}), but now they "
                f"are divided as ({'), ('.join(self._spelled_numbers)}). Use jd.save and jd.restore, which can divide "
                "states again."
            )
        each = enumerate(zip(self._on_owners, states, strict=True))
        return [{"values": {k: values[k] for k in mine}, "states": {place: one}} for place, ((_, mine), one) in each]

    def _step_with(self, gradients: Any, extra: dict[str, Any]) -> None:
        found = _by_reference(gradients)
        missing = [str(rref) for rref in self._rrefs if rref.id not in found]
        if missing:
            raise DifferentiationError(
                f"optimizer.step: no RemoteGradient of {', '.join(missing)} among the gradients. Differentiate with "
                "respect to the reference, or step with the context: optimizer.step(ctx).",
                missing=missing,
            )
        mine = [found[rref.id] for rref in self._rrefs]
        with within(_scope_of([one for each in mine for one in each])):
            marks = [functools.reduce(operator.add, [one.marks for one in each]) for each in mine]
            others = []
            if self._max_norm is not None or self._refuse_nan:
                inspected = jnp.stack(self._use(owner.Inspect, marks, []))
                others = [jnp.asarray(self._factor(inspected[:, 0], jnp)), inspected[:, 1]]
            owners = self._owners if self._refuse_nan else ()
            function = functools.partial(owner.OwnersStep, owners=owners, extra=tuple(extra))
            self._use(function, marks, [*extra.values(), *others])

    def _use(self, function: Callable[..., Any], marks: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Let all owners use their gradients; return the array that each use returns."""
        uses = [
            use(function(owned.id), [(self._rrefs[k], marks[k]) for k in mine], others)
            for owned, mine in self._on_owners
        ]
        return use_all(uses, needs=(self._on_owners, self._rrefs))

    def _factor(self, squares: Any, numpy: Any) -> Any:
        """Return the factor for gradients with these squared norms. ``numpy``: NumPy's module or JAX's."""
        if self._max_norm is None:
            return np.float32(1)
        return self._max_norm / numpy.maximum(numpy.sqrt(squares.sum()), self._max_norm)

    def _everywhere(self, method: str, *args: Any) -> list[Any]:
        """Call a method with the gradients in the current context on all owners; return the results."""
        given = [(owned, (owned.id, method, *args)) for owned, _ in self._on_owners]
        return _all([api.rpc_async(owned.owner, owner.with_gradients, each) for owned, each in given])


def _checked(rrefs: Sequence[RRef[Any]]) -> list[RRef[Any]]:
    if isinstance(rrefs, RRef | Mapping):
        raise TypeError("DistributedOptimizer takes a list of RRefs: list(rrefs.values()), or [rref] for a single one")
    found = list(rrefs)
    for rref in found:
        if not isinstance(rref, RRef):
            raise TypeError(
                f"DistributedOptimizer optimizes RRefs, not {type(rref).__name__}: of a module pass module.parameters; "
                "wrap a value of this worker, RRef(value); to send a reference as an argument, jd.by_reference(rref)"
            )
    if not found or len(set(found)) < len(found):
        raise ValueError(f"DistributedOptimizer needs at least one RRef, each once: {found}")
    return found


def _by_reference(gradients: Any) -> dict[int, list[RemoteGradient]]:
    found: dict[int, list[RemoteGradient]] = collections.defaultdict(list)
    for leaf in jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, RemoteGradient)):
        if not isinstance(leaf, RemoteGradient):
            raise TypeError(
                f"optimizer.step takes a context or RemoteGradients, as value_and_grad returns for references, not "
                f"{leaf!r:.60}. Gradients of local arrays are for optax: tx.update(gradients, state)."
            )
        if jnp.shape(leaf.marks) != NO_MARKS.shape:
            raise DifferentiationError(
                f"optimizer.step: the {leaf} is a batch of gradients, made in jax.vmap. Differentiate a function that "
                "is mapped inside, so that each reference has one gradient."
            )
        if not any(leaf.handle is one.handle for one in found[leaf.rref.id]):
            found[leaf.rref.id].append(leaf)
    return found


def _scope_of(gradients: Sequence[RemoteGradient]) -> Any:
    scopes = {one.scope for one in gradients}
    if len(scopes) > 1:
        raise ContextError("optimizer.step: the gradients belong to several contexts. Step with those of one context.")
    (scope,) = scopes
    if not trace_state_clean():
        return scope
    if scope is None:
        raise ContextError(
            f"optimizer.step: the {gradients[0]} belongs to no context: it was made outside any, by jax.tree.map for "
            "example. Do that inside `with jd.context()`, or in a function staged by jd.jit."
        )
    current_worker().scopes.find(scope.id)
    return scope


def _all(futures: Sequence[concurrent.futures.Future[Any]]) -> list[Any]:
    """Wait for all futures; return their results, or raise the first failure."""
    failures = [future.exception() for future in futures]
    for failure in failures:
        if failure is not None:
            raise failure
    return [future.result() for future in futures]
