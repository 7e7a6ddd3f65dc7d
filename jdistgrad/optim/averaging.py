"""Averaging as an optax transformation: of gradients, or of parameters every few steps (local SGD, DiLoCo).

And optimizers that do not change unused parameters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.collectives.base import Collectives, require_collectives
from jdistgrad.collectives.default import shared
from jdistgrad.collectives.host import HostCollectives
from jdistgrad.collectives.host_arrays import any_traced
from jdistgrad.data_parallel.agreement import Rules
from jdistgrad.data_parallel.buckets import Cap
from jdistgrad.data_parallel.compiled import CompiledAverage
from jdistgrad.data_parallel.driver import Driver, shared_driver
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.optim.optax_extras import with_extra_arguments


class AverageGradientsState(NamedTuple):
    """The hook's state for each bucket, on this rank."""

    hook: list[Any]


def average_gradients(
    collectives: Collectives | None = None, *, bucket_cap_mb: Cap = None, hook: Hook | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return an optax transformation that averages gradients over all ranks, to be chained with others.

    Every rank must call ``init`` and ``update``, in the same order. Works in ``jit``, on a mesh inside ``shard_map``,
    and eagerly. After an update that has failed on some ranks only, call ``init`` again, on every rank; the old state
    may still be used. On a mesh, a hook's state differs from device to device: its ``shard_map`` spec must say so.

    Arguments:
      collectives: the ranks that average; default all workers of this world.
      bucket_cap_mb: how many MiB of gradients travel together; default 25, and 1 for the first bucket.
      hook: processes a bucket instead of averaging it. The hook's state is part of the optimizer's.

    Example:
      >>> tx = optax.chain(jd.average_gradients(), optax.adam(1e-3))
    """
    if collectives is not None:
        remedy = "An optimizer comes after the average: optax.chain(jd.average_gradients(), optimizer)."
        require_collectives("average_gradients", collectives, remedy)
    rules = Rules(bucket_cap_mb, hook=hook)

    def group(*, renew: bool = False) -> tuple[Collectives, Driver | None]:
        all_ = shared() if collectives is None else collectives
        return all_, shared_driver(all_, rules, renew=renew) if isinstance(all_, HostCollectives) else None

    def init(params: Any) -> AverageGradientsState:
        all_, driver = group(renew=True)
        return AverageGradientsState(CompiledAverage(all_, rules, driver).initial_states(params))

    def update(
        updates: Any, state: AverageGradientsState, params: Any = None, **extra: Any
    ) -> tuple[Any, AverageGradientsState]:
        all_, driver = group()
        if driver is None or any_traced(updates):
            averaged, states = CompiledAverage(all_, rules, driver).average_with(updates, state.hook)
        else:
            averaged, states = driver.average_with(updates, hook, state.hook)
        return averaged, AverageGradientsState(states)

    return optax.GradientTransformationExtraArgs(init, update)


class LocalSgdState(NamedTuple):
    """The state of ``local_sgd`` on this rank.

    ``steps``: their number since the last exchange. ``start``: the parameters after the exchange. ``exchange``: the
    hook's state. ``start`` and ``outer`` are the same on all ranks.
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
    ``jax.value_and_grad``. In the exchange, the change of the parameters since the last exchange is averaged over the
    ranks, and the outer optimizer gets the average as a gradient (DiLoCo). All ranks must begin with the same
    parameters and take equally many steps. Between exchanges the parameters differ from rank to rank; after an exchange
    they are equal up to the rounding of ``params + updates``, which does not accumulate.

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
    if every < 1:
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
        if isinstance(after.steps, jax.core.Tracer):  # the compiled program decides when it runs
            return jax.lax.cond(after.steps >= every, lambda: exchanged(found, after, params), lambda: (found, after))
        return exchanged(found, after, params) if int(np.asarray(after.steps)) >= every else (found, after)

    def exchanged(updates: Any, state: LocalSgdState, params: Any) -> tuple[Any, LocalSgdState]:
        way = jax.tree.map(lambda start, p, u: (start - (p + u)).astype(p.dtype), state.start, params, updates)
        averaged, exchange = average.update(way, state.exchange)
        change, outer_state = above.update(averaged, state.outer, state.start)
        start = optax.apply_updates(state.start, change)
        moves = jax.tree.map(lambda there, p, u: (there - p).astype(u.dtype), start, params, updates)
        return moves, LocalSgdState(state.steps * 0, state.inner, start, outer_state, exchange)

    return optax.GradientTransformationExtraArgs(init, update)


def keep_unused(tx: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that does not change parameters that no rank used, nor their optimizer state.

    A zero gradient is not enough: moments still decay, and momentum and weight decay still act. Counts of steps, which
    all parameters share in optax, increase: a parameter that is used late gets the bias correction of its late step.

    Arguments:
      tx: any optimizer. Its ``update`` takes ``used=``, a tree of booleans: ``DataParallel.used``. With
        ``optax.MultiSteps``, pass the parameters that any step since the last update has used: otherwise those that the
        last step has not used lose the gradients of the steps before.

    Example:
      >>> tx = keep_unused(optax.adam(1e-3))
      >>> updates, state = tx.update(gradients, state, params, used=dp.used)
    """
    inner = with_extra_arguments(tx)

    def update(updates: Any, state: Any, params: Any = None, *, used: Any = None, **extra: Any) -> tuple[Any, Any]:
        if used is None:
            raise ValueError("keep_unused: update needs used=dp.used, of a DataParallel(find_unused_parameters=True)")
        after, new = inner.update(updates, state, params, **extra)
        kept = _where_used(used, updates, new, state)
        return jax.tree.map(lambda use, u: jnp.where(use, u, jnp.zeros_like(u)), used, after), kept

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _where_used(used: Any, like: Any, new: Any, old: Any) -> Any:
    """Return the new state, with the old state of unused parameters in each part that has a leaf per parameter."""
    structure: Any = jax.tree.structure(used)
    alone = jax.tree_util.treedef_is_leaf(structure)  # then any leaf of a state has the structure of the parameters
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(like)]

    def is_of(leaf: Any, shape: tuple[int, ...]) -> bool:
        """Return whether a leaf may be state of a parameter: of its shape, or a slice, factored moments, or masked."""
        if isinstance(leaf, list):
            return all(is_of(one, shape) for one in leaf)
        if isinstance(leaf, optax.MaskedNode) or not hasattr(leaf, "shape"):
            return isinstance(leaf, optax.MaskedNode)
        counts = not jnp.issubdtype(leaf.dtype, jnp.inexact)  # steps, or it is a random key
        if alone:  # only the dtype tells a count, and only the shape a setting, from a parameter's moment
            return not counts and (leaf.shape == shape or leaf.ndim > 0)
        return leaf.shape == shape or leaf.ndim > 0 or not counts

    def belongs(part: Any) -> bool:
        try:
            leaves = structure.flatten_up_to(part)
        except (ValueError, TypeError):
            return False
        return all(map(is_of, leaves, shapes))

    def choose(after: Any, before: Any) -> Any:
        if not belongs(after):
            return after
        return jax.tree.map(
            lambda use, *both: jax.tree.map(lambda new, old: jnp.where(use, new, old), *both), used, after, before
        )

    # The hook of averages has a state for each bucket.
    return jax.tree.map(choose, new, old, is_leaf=lambda part: isinstance(part, AverageGradientsState) or belongs(part))
