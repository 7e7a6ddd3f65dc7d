"""The optimizer of parameters on other workers: one optax state on each owner, one step for all."""

import collections
import concurrent.futures
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Never

import cloudpickle
import optax

from jdistgrad.autograd.contexts import Context, find_context
from jdistgrad.corrections import Corrected
from jdistgrad.errors import DifferentiationError
from jdistgrad.optim import owner
from jdistgrad.rpc import api
from jdistgrad.rpc.current import within
from jdistgrad.rpc.references.rref import RRef, by_reference


class DistributedOptimizer(Corrected):
    """An optimizer that applies an optax transformation to values on their owners.

    Each owner keeps one state for all its values. ``step`` updates all owners at once, each under a lock, so trainers
    with contexts of their own may share parameters (each with an optimizer of its own, or one passed on to it). A local
    value takes part as ``jdistgrad.RRef(value)``.

    Arguments:
      tx: any optax transformation. Each owner applies it to its own values; to clip by a norm over all of them, use
        ``max_global_norm``.
      rrefs: the values to optimize. Leaves that are not float arrays stay as they are.
      max_global_norm: scale gradients down so that their norm, over all owners, is at most this.
      refuse_nan: if a gradient is not finite, raise and change nothing on any owner.

    Example:
      >>> optimizer = jd.DistributedOptimizer(optax.adam(1e-3), [enc, dec])
      >>> with jd.context() as ctx:
      ...     loss, _ = jd.value_and_grad(loss_fn, argnums=(0, 1))(enc, dec)
      ...     optimizer.step(ctx)
    """

    corrections: ClassVar = {
        "zero_grad": "gradients belong to a context, and each step has a new one: there is nothing to reset",
        "state_dict": "state() returns values and optimizer states",
        "load_state_dict": "restore(state) takes what state() returned",
    }

    def __init__(
        self,
        tx: optax.GradientTransformation,
        rrefs: Sequence[RRef[Any]],
        *,
        max_global_norm: float | None = None,
        refuse_nan: bool = False,
        **settings: Never,
    ):
        if settings or not isinstance(tx, optax.GradientTransformation):
            raise TypeError(_no_transformation(tx, settings))
        self._rrefs = _checked(rrefs)
        if max_global_norm is not None and not max_global_norm > 0:
            raise ValueError(f"max_global_norm must be positive, not {max_global_norm!r}")
        self._max_norm, self._refuse_nan = max_global_norm, refuse_nan
        packed = cloudpickle.dumps(tx)
        numbers: dict[int, list[int]] = collections.defaultdict(list)
        for number, rref in enumerate(self._rrefs):
            numbers[rref.owner.rank].append(number)
        self._numbers = dict(numbers)
        self._owned = {
            rank: api.remote(rank, owner.own_parameters, (packed, [by_reference(self._rrefs[k]) for k in mine]))
            for rank, mine in self._numbers.items()
        }
        _all([owned.creation() for owned in self._owned.values()])

    def step(self, ctx: Context | int) -> None:
        """Update every value with its gradient in a context; return when all owners are done.

        Raises:
          DifferentiationError: a value has no gradient there, or a gradient that is not finite; nothing was changed.
          ContextError: the context is closed, or unknown here.
        """
        with within(find_context(ctx).scope):
            scale = self._scale()
            self._everywhere(owner.step, scale)

    def state(self) -> dict[str, Any]:
        """Return values and optimizer states as a pytree that can be saved: ``{"values": [...], "states": [...]}``."""
        found = self._everywhere(owner.state)
        values: list[Any] = [None] * len(self._rrefs)
        for mine, (here, _) in zip(self._numbers.values(), found, strict=True):
            for number, value in zip(mine, here, strict=True):
                values[number] = value
        return {"values": values, "states": [state for _, state in found]}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned, for an optimizer of the same values on the same owners.

        The arrays may be NumPy's. All owners check their parts before the first restores its own.

        Raises:
          ValueError: the state has another structure, or other shapes or dtypes; nothing was restored on any owner.
        """
        parts = zip(self._owned.values(), self._parts(state), strict=True)
        prepared = [(owned, api.remote(owned.owner, owner.prepare, (owned.id, part))) for owned, part in parts]
        _all([part.creation() for _, part in prepared])
        _all([api.rpc_async(owned.owner, owner.put_back, (owned.id, part.id)) for owned, part in prepared])

    def _parts(self, state: Any) -> list[owner.Saved]:
        """Return each owner's part of a saved state."""
        values, states = _lists(state)
        if len(values) != len(self._rrefs) or len(states) != len(self._owned):
            raise ValueError(
                f"restore: {len(values)} values on {len(states)} owners, but this optimizer has {len(self._rrefs)} on "
                f"{len(self._owned)}"
            )
        each = enumerate(zip(self._numbers.values(), states, strict=True))
        return [{"values": {k: values[k] for k in mine}, "states": {place: one}} for place, (mine, one) in each]

    def _scale(self) -> float:
        """Return the factor for the gradients. Raise, before anything is changed, if a step cannot be made."""
        if len(self._owned) == 1 and self._max_norm is None and not self._refuse_nan:
            return 1.0  # the only owner checks for itself
        found = self._everywhere(owner.inspect_gradients)
        if self._refuse_nan and not all(one.finite for one in found):
            bad = [str(owned.owner) for owned, one in zip(self._owned.values(), found, strict=True) if not one.finite]
            raise DifferentiationError(f"a gradient on {', '.join(bad)} is not finite: no step was made", workers=bad)
        norm = math.sqrt(sum(one.squared_norm for one in found))
        return 1.0 if self._max_norm is None or norm <= self._max_norm else self._max_norm / norm

    def _everywhere(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return _all([api.rpc_async(owned.owner, function, (owned.id, *args)) for owned in self._owned.values()])


def _no_transformation(tx: Any, settings: Mapping[str, Any]) -> str:
    """Return the error for arguments that are PyTorch's: a class of optimizers, and its settings."""
    needed = "DistributedOptimizer needs an optax transformation with its settings, like optax.adam(1e-3)"
    if not callable(tx):
        return f"{needed}, not {tx!r:.60}" if not settings else f"{needed}; it has no setting {next(iter(settings))!r}"
    given = ", ".join(map(repr, settings.values())) or "..."
    return f"{needed}, not the function that makes one: {getattr(tx, '__name__', tx)}({given})"


def _checked(rrefs: Sequence[RRef[Any]]) -> list[RRef[Any]]:
    if isinstance(rrefs, RRef):
        raise TypeError("DistributedOptimizer takes a list of RRefs: for a single one, [rref]")
    found = list(rrefs)
    for rref in found:
        if not isinstance(rref, RRef):
            raise TypeError(f"DistributedOptimizer optimizes RRefs, not {type(rref).__name__}: wrap it, RRef(value)")
    if not found or len(set(found)) < len(found):
        raise ValueError(f"DistributedOptimizer needs at least one RRef, each once: {found}")
    return found


def _lists(state: Any) -> list[Sequence[Any]]:
    """Return the values and the optimizer states of a saved state."""
    if not isinstance(state, Mapping) or not {"values", "states"} <= set(state):
        held = (", ".join(map(repr, state)) or "nothing in it") if isinstance(state, Mapping) else ""
        found = f"a {type(state).__name__}" + (f" with {held}" if held else "")
        raise ValueError(f"restore takes what state() gave, a dict with 'values' and 'states', not {found}")
    for name in ("values", "states"):
        if not isinstance(state[name], list | tuple):
            raise ValueError(f"restore: {name!r} is a {type(state[name]).__name__}, expected a list, as state() gave")
    return [state["values"], state["states"]]


def _all(futures: Sequence[concurrent.futures.Future[Any]]) -> list[Any]:
    """Wait for all futures; return their results, or raise the first failure."""
    failures = [future.exception() for future in futures]
    for failure in failures:
        if failure is not None:
            raise failure
    return [future.result() for future in futures]
