"""The optimizer of parameters on other workers: one transformation of all, divided among the owners."""

import collections
import concurrent.futures
import contextlib
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Never

import jax
import jax.numpy as jnp
import optax

from jdistgrad._compat import trace_state_clean
from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.autograd.gradients import RemoteGradient
from jdistgrad.autograd.operations.uses import use, use_all
from jdistgrad.autograd.values.holes import shape_of
from jdistgrad.corrections import Corrected
from jdistgrad.errors import ContextError, DifferentiationError
from jdistgrad.optim import owner
from jdistgrad.optim.division import HERE
from jdistgrad.optim.optax_extras import with_extra_arguments
from jdistgrad.optim.owners_plan import Method, Piece, Plan, by_leaf
from jdistgrad.optim.stepping import Stepping
from jdistgrad.optim.values import shapes_of
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.handles import NO_MARKS
from jdistgrad.rpc.rref import RRef, by_reference, references_kept
from jdistgrad.rpc.worker import current_worker

_Share = tuple[RRef[owner.OwnedParameters], list[int]]  # what is on an owner, and the numbers of its values


class DistributedOptimizer(Corrected):
    """An optimizer that applies an optax transformation to values on their owners.

    The transformation sees the list of all values, as in one process; its program is traced and divided among the
    owners, as that of ``on_owners`` is, and each keeps its part of the state. ``step`` updates all owners at once, each
    under a lock, so trainers with contexts of their own may share parameters (each with an optimizer of its own, or one
    passed on to it). Their steps may meet on the owners in any order, also between two rounds of one step. A local
    value takes part as ``jdistgrad.RRef(value)``.

    In a function staged by ``jit``, ``step(gradients)`` of an owner goes in the message of its last pullback.

    Arguments:
      tx: any optax transformation but those that combine whole arrays of several owners. It gets the list of values: a
        mask or labels (``optax.masked``, ``optax.partition``) are a function of that list, or a list too.
      rrefs: the values to optimize. Leaves that are not float arrays stay as they are.
      max_global_norm: scale gradients down so that their norm is at most this, as ``optax.clip_by_global_norm`` before
        ``tx`` does. None, or ``math.inf``: any norm.
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
        numbers: dict[int, list[int]] = collections.defaultdict(list)
        for number, rref in enumerate(self._rrefs):
            numbers[rref.owner.rank].append(number)
        tested = {str(self._rrefs[mine[0]].owner): mine for mine in numbers.values()} if refuse_nan else {}
        stepping = Stepping(tx, None if max_global_norm == math.inf else max_global_norm, tested)
        self._plan = _plan(stepping, self._rrefs)
        self._structure: Any = jax.tree.structure(self._plan.state.inner)
        self._on_owners: dict[int, _Share] = {}
        for rank, mine in sorted(numbers.items()):
            args = self._plan, {k: by_reference(self._rrefs[k]) for k in mine}
            self._on_owners[rank] = api.remote(rank, owner.OwnedParameters, args), mine
        _all([owned.creation() for owned, _ in self._on_owners.values()])
        init = Method("init")
        self._plan.division(init).carry_out(functools.partial(self._call, owner.init, init, ()))

    def step(self, gradients: Any = None, **extra: Any) -> None:
        """Update every value with its gradient; return when all owners are done.

        Arguments:
          gradients: a context or its id, for all gradients accumulated there; or the result of ``grad``,
            ``value_and_grad`` or ``backward``: a tree of RemoteGradients. Those of other references are ignored.
          extra: extra arguments of the transformation, on every owner: ``value=loss`` for
            ``optax.contrib.reduce_on_plateau``.

        In a function staged by ``jit``, every owner steps as soon as its gradients are complete; where numbers over all
        owners are needed, as for ``max_global_norm`` or ``refuse_nan``, once all have sent theirs, with the answers of
        their last pullbacks. Gradients accumulate in a context, and stay there after a step: open a context for each
        step, or none.

        Raises:
          DifferentiationError: a value has no gradient, or a gradient that is not finite; nothing was changed (but if
            a staged step is running, other owners may have stepped).
          ValueError: the transformation combines arrays of several owners; nothing was changed.
          ContextError: the context is closed, or unknown here.
          StaleReferenceError: the optimizer was made in a world that has been shut down.
        """
        shares = self.shares("optimizer.step")
        arrays = {name: jnp.asarray(value) for name, value in extra.items()}
        if not isinstance(gradients, Context | contextlib.AbstractContextManager | int):
            self._step_with(gradients, arrays)
            return
        if not trace_state_clean():
            raise DifferentiationError(
                "optimizer.step(ctx) inside a transformation of JAX's would run while it is traced, not with it. In a "
                "function staged by jd.jit, step with what value_and_grad returned: optimizer.step(gradients)."
            )
        method = _method(arrays)
        with within(find_context(gradients).scope):
            division = self._plan.division(method)
            tested = [rank in division.rounds[0] and not division.is_last(0, rank) for rank in self._on_owners]
            if len(tested) > 1 and not all(tested):
                test = owner.wait_for_gradients  # before the first owner steps
                _all([api.rpc_async(owned.owner, test, (owned.id,)) for owned in shares])
            division.carry_out(functools.partial(self._call, owner.step, method, tuple(arrays.values())))

    def state(self) -> dict[str, Any]:
        """Return the values and the transformation's state as a pytree that can be saved.

        It is ``{"values": [...], "state": ...}``. The state is that of one process, for the list of all values.
        """
        shares, there = self.shares("optimizer.state"), owner.OwnedParameters.state
        values, leaves = dict[int, Any](), dict[str, Any]()
        for saved in _all([api.rpc_async(owned.owner, there, (owned,)) for owned in shares]):
            values |= saved["values"]
            leaves |= saved["state"]
        state = jax.tree.unflatten(self._structure, [leaves[name] for name in owner.state_names(self._plan)])
        return {"values": [values[k] for k in range(len(self._rrefs))], "state": state}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``state``, for the same values on whichever owners.

        The arrays may be NumPy's. All owners check their parts before the first restores its own.

        Raises:
          ValueError: the state has another structure, other shapes or dtypes; nothing was restored on any owner.
        """
        shares, there = self.shares("optimizer.restore"), owner.OwnedParameters
        each = zip(shares, references_kept(self._parts(state)), strict=True)
        prepared = [(owned, api.remote(owned.owner, there.prepare, (owned, part))) for owned, part in each]
        _all([part.creation() for _, part in prepared])
        _all([api.rpc_async(owned.owner, there.put_back, (owned, part)) for owned, part in prepared])

    def shares(self, what: str) -> list[RRef[owner.OwnedParameters]]:
        """Return what is on each owner. Raises StaleReferenceError in another world, where ids mean other values."""
        for rref in self._rrefs:
            rref.home(what)
        return [owned for owned, _ in self._on_owners.values()]

    def _parts(self, state: Any) -> list[owner.Saved]:
        if not isinstance(state, Mapping) or not {"values", "state"} <= set(state):
            raise ValueError("restore takes the result of state(), a dict with 'values' and 'state'")
        values, found, known = state["values"], jax.tree.structure(state["state"]), self._structure
        if len(values) != len(self._rrefs) or found != known:
            ours = f"{len(self._rrefs)} and {known}"
            raise ValueError(f"restore: {len(values)} values and the state {found}, but this optimizer has {ours}")
        names, places = owner.state_names(self._plan), by_leaf(self._plan.state_pieces)
        named = list(zip(names, jax.tree.leaves(state["state"]), places, strict=False))
        return [
            {
                "values": {k: values[k] for k in mine},
                "state": {name: leaf for name, leaf, place in named if place in (rank, HERE)},
            }
            for rank, (_, mine) in self._on_owners.items()
        ]

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
            method = _method(extra)
            self._plan.division(method).carry_out(functools.partial(self._use, marks, method, tuple(extra.values())))

    def _call(self, function: Any, method: Method, extra: Any, number: int, ranks: Sequence[int], sent: Any) -> Any:
        """Call a function on owners in a round; return what each sends."""
        each = [(rank, (self._on_owners[rank][0].id, method.extra, number, [*extra, *sent])) for rank in ranks]
        return _all([api.rpc_async(rank, function, args) for rank, args in each])

    def _use(self, marks: Any, method: Method, extra: Any, number: int, ranks: Sequence[int], sent: Any) -> list[Any]:
        """Let owners use their gradients in a round; return what each sends."""
        parts, uses = self._plan.division(method).rounds[number], []
        for rank in ranks:
            owned, mine = self._on_owners[rank]
            function = owner.StepOnOwner(owned.id, method, number, parts[rank].size)
            uses.append(use(function, [(self._rrefs[k], marks[k]) for k in mine], [*extra, *sent]))
        return use_all(uses, needs=(self._on_owners, self._rrefs))


def _plan(stepping: Stepping, rrefs: Sequence[RRef[Any]]) -> Plan:
    """Return the plan of a step. Raises what the transformation raises for such values."""
    shapes = shapes_of(rrefs)
    pieces = [Piece(rref.owner.rank, jax.tree.structure(one)) for rref, one in zip(rrefs, shapes, strict=True)]
    try:
        return Plan(stepping, shapes, pieces, is_shared=True)
    except Exception as error:
        error.add_note(
            f"DistributedOptimizer: the transformation gets a list of the {len(rrefs)} values that are optimized. Pass "
            "masks or labels as such a list too, or as a function of the list."
        )
        raise


def _method(extra: Mapping[str, Any]) -> Method:
    return Method("update", extra=tuple((name, shape_of(one)) for name, one in extra.items()))


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
