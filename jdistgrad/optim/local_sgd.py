"""Training that averages parameters every few steps instead of gradients in every step (local SGD, DiLoCo)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.data_parallel.collectives import Collectives
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.optim.averaging import average_gradients, with_extra_arguments


class LocalSgdState(NamedTuple):
    """The state of ``local_sgd`` on this rank.

    ``steps``: those taken since the last exchange. ``start``: the parameters after it, the same on all ranks. So is
    ``outer``. A rank's own are ``inner`` and ``exchange``, the hook's state.
    """

    steps: Any
    inner: Any
    start: Any
    outer: Any
    exchange: Any


def local_sgd(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    collectives: Collectives | None = None,
    bucket_cap_mb: float | None = None,
    hook: Hook | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer by which each rank trains alone, and every few steps all ranks average their parameters.

    The ranks exchange ``1 / every`` of the bytes of ``average_gradients``. Give it this rank's own gradients, of
    ``jax.value_and_grad``. In the exchange, the parameters' way since the last exchange is averaged over the ranks and
    handed to the outer optimizer as a gradient (DiLoCo). All ranks must begin with the same parameters and take equally
    many steps. In steps without exchange the parameters differ from rank to rank; after an exchange they are equal up
    to the rounding of ``params + updates``, which does not add up.

    Call ``update`` from Python: a step without exchange then takes microseconds more than the inner optimizer's. Inside
    ``jax.jit`` it works too, but each step runs a program that contains the exchange.

    Arguments:
      inner: the optimizer of each rank's own steps.
      every: the number of steps from one exchange to the next.
      outer: the optimizer of the exchange; default ``optax.sgd(1.0)``, by which parameters become the average of all
        ranks'. DiLoCo's is ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      collectives, bucket_cap_mb, hook: as for ``average_gradients``; the hook processes what is exchanged.

    Example:
      >>> tx = local_sgd(optax.adam(1e-3), every=20)
      >>> state = tx.init(params)
    """
    if isinstance(every, bool) or not isinstance(every, int | np.integer) or every < 1:
        raise ValueError(f"local_sgd: every must be a number of steps, 1 or more, not {every!r}")
    mine, above = with_extra_arguments(inner), with_extra_arguments(outer or optax.sgd(1.0))
    average = average_gradients(collectives, bucket_cap_mb=bucket_cap_mb, hook=hook)

    def init(params: Any) -> LocalSgdState:
        start = jax.tree.map(jnp.array, params)  # a copy: steps may donate the parameters
        return LocalSgdState(0, mine.init(params), start, above.init(params), average.init(params))

    def update(updates: Any, state: LocalSgdState, params: Any = None, **extra: Any) -> tuple[Any, LocalSgdState]:
        if params is None:
            raise ValueError("local_sgd: update needs the parameters: tx.update(gradients, state, params)")
        found, own = mine.update(updates, state.inner, params, **extra)
        after = state._replace(steps=state.steps + 1, inner=own)
        return _either(after.steps, every, lambda: exchanged(found, after, params), lambda: (found, after))

    def exchanged(updates: Any, state: LocalSgdState, params: Any) -> tuple[Any, LocalSgdState]:
        way = jax.tree.map(lambda start, p, u: (start - (p + u)).astype(p.dtype), state.start, params, updates)
        averaged, exchange = average.update(way, state.exchange)
        change, outer_state = above.update(averaged, state.outer, state.start)
        start = optax.apply_updates(state.start, change)
        moves = jax.tree.map(lambda there, p, u: (there - p).astype(u.dtype), start, params, updates)
        return moves, LocalSgdState(state.steps * 0, state.inner, start, outer_state, exchange)

    return optax.GradientTransformationExtraArgs(init, update)


def _either(steps: Any, every: int, at_end: Callable[[], Any], else_: Callable[[], Any]) -> Any:
    """Return the result of one of two functions; in a compiled program, the program decides when it runs."""
    if isinstance(steps, jax.core.Tracer):
        return jax.lax.cond(steps >= every, at_end, else_)
    return at_end() if int(np.asarray(steps)) >= every else else_()
