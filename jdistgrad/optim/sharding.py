"""Optimizer state sharded over the ranks: ZeRO stages 1 and 2.

Rajbhandari et al., "ZeRO" (SC 2020). Each rank keeps the state of its slice of every flattened parameter and computes
that slice's update, then all ranks gather the updates. The state has the parameters' tree, so masks by path work as
without sharding. Guarantee: the same updates as without sharding, for elementwise optimizers
(sgd, momentum, adam, rmsprop, weight decay). Weakness: transformations that look at whole leaves or their shapes (lars,
adafactor, clipping by norm) would see slices: ``init`` tries a transformation on a small tree, and refuses these.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.collectives.base import Collectives, require_collectives
from jdistgrad.collectives.default import shared
from jdistgrad.collectives.operations import divided
from jdistgrad.data_parallel.buckets import limits_of, plan_buckets
from jdistgrad.optim.optax_extras import on_parameters, scaled_down, sum_of_squares, with_extra_arguments


def shard_state(
    tx: optax.GradientTransformation | optax.MultiSteps,
    collectives: Collectives | None = None,
    *,
    average: bool = False,
    max_global_norm: float | None = None,
    bucket_cap_mb: float | None = None,
    try_first: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose state is sharded over the ranks.

    Every rank must call ``init`` and ``update`` with the same parameters. To save the state, gather it by
    ``gather_state``; ``divide_state`` shards the result over any number of ranks.

    Arguments:
      tx: an elementwise optimizer.
      collectives: the ranks that share the state; default all workers of this world. On a mesh, ``init`` runs inside
        ``shard_map`` too, and the state is sharded over the axis.
      average: average the gradients, too: ``update`` gets this rank's own gradients, from ``jax.value_and_grad``. Each
        rank then averages its slices only, so a step sends 2 (n-1)/n of the gradients' bytes (ZeRO stage 2), as many
        as without sharding. Otherwise ``update`` gets averages, and gathering the updates comes on top.
      max_global_norm: scale the (averaged) gradients down so that their norm, over all parameters, is at most this, as
        ``optax.clip_by_global_norm`` does.
      bucket_cap_mb: how many MiB of gradients and updates travel together; default 25, and 1 for the first bucket.
      try_first: whether ``init`` tries ``tx`` on a small tree, to check that it is elementwise.

    Raises:
      ValueError: (``init``) the transformation is not elementwise.

    Example:
      >>> tx = shard_state(optax.adam(1e-3), average=True)
      >>> state = tx.init(params)
      >>> value, gradients = jax.value_and_grad(loss)(params, batch_of_this_rank)
      >>> updates, state = tx.update(gradients, state, params)
    """
    inner, limits = with_extra_arguments(tx), limits_of(bucket_cap_mb)
    if collectives is not None:
        _chosen(collectives)

    def init(params: Any) -> Any:
        if try_first:
            require_elementwise(inner, params)
        return inner.init(_slices(params, _chosen(collectives)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        all_ = _chosen(collectives)
        mine = None if params is None else _slices(params, all_)
        own = _averaged_slices(updates, all_, limits) if average else _slices(updates, all_)
        if max_global_norm is not None:
            own = scaled_down(own, all_.allreduce(sum_of_squares(own)), max_global_norm)
        slices, state = inner.update(own, state, mine, **extra)
        return _gathered(slices, updates, all_, limits), state

    return optax.GradientTransformationExtraArgs(init, update)


def gather_state(
    tx: optax.GradientTransformation | optax.MultiSteps, state: Any, params: Any, collectives: Collectives | None = None
) -> Any:
    """Gather a sharded state from all ranks, and return the whole. Every rank must call it.

    Arguments:
      tx: the optimizer that was given to ``shard_state``; the result is a state of this optimizer.
      state: this rank's part.
      params: the parameters.

    Raises:
      ValueError: the state has a part that is no slice of a parameter for so many ranks.
    """
    all_ = _chosen(collectives)

    def whole(part: jax.Array, like: Any) -> jax.Array:
        slice_ = (-(-math.prod(jnp.shape(like)) // all_.size),)
        _require_shape("gather_state", part, slice_, f"a slice for {all_.size} ranks", jnp.shape(like))
        return _put_together(all_.gather_same(part), (part.size,), (jnp.shape(like),))[0]

    return on_parameters(tx, whole, state, params)


def divide_state(
    tx: optax.GradientTransformation | optax.MultiSteps, state: Any, params: Any, collectives: Collectives | None = None
) -> Any:
    """Return this rank's part of a whole state: the inverse of ``gather_state``, on any number of ranks.

    Example:
      >>> inner = optax.adam(1e-3)
      >>> state = shard_state(inner).init(params)
      >>> whole = gather_state(inner, state, params)  # on 4 ranks
      >>> state = divide_state(inner, whole, params)  # on 2
    """
    all_ = _chosen(collectives)

    def part(leaf: Any, like: Any) -> Any:
        _require_shape("divide_state", leaf, jnp.shape(like), "a whole", jnp.shape(like))
        return _slices(leaf, all_)

    return on_parameters(tx, part, state, params)


def _require_shape(what: str, leaf: Any, expected: tuple[int, ...], kind: str, parameter: tuple[int, ...]) -> None:
    """Raise ValueError for a leaf of a state that is not the slice, or the whole, that is expected for a parameter."""
    if jnp.shape(leaf) != expected:
        raise ValueError(
            f"{what}: the state has a leaf of the shape {list(jnp.shape(leaf))} for a parameter of the shape "
            f"{list(parameter)}, expected {list(expected)}, {kind}. What has other shapes than the parameters "
            "(optax.zero_nans, optax.adafactor) belongs outside of shard_state."
        )


def _chosen(collectives: Collectives | None) -> Collectives:
    if collectives is None:
        return shared()
    require_collectives("a sharded state", collectives)
    return collectives


def _slices(tree: Any, all_: Collectives) -> Any:
    """Return this rank's part of each leaf, flattened and padded so that all parts are equal in size."""
    return _cut(tree, jnp.asarray(all_.rank), all_.size)


@functools.partial(jax.jit, static_argnums=2)
def _cut(tree: Any, rank: jax.Array, size: int) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(_parts(leaf, size), rank, keepdims=False), tree)


def _parts(leaf: Any, size: int) -> jax.Array:
    """Return a leaf's parts for all ranks, by rank."""
    flat = jnp.ravel(leaf)
    length = -(-flat.size // size)
    return jnp.pad(flat, (0, length * size - flat.size)).reshape(size, length)


def _averaged_slices(tree: Any, all_: Collectives, limits: Sequence[int]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    found = [jnp.asarray(leaf) for leaf in leaves]
    for chosen in plan_buckets(found, limits, large_alone=True):
        rows = _rows([found[k] for k in chosen], all_.size)
        ends = list(itertools.accumulate(-(-found[k].size // all_.size) for k in chosen))
        for k, part in zip(chosen, jnp.split(all_.reduce_scatter(rows), ends[:-1]), strict=True):
            found[k] = part
    return jax.tree.unflatten(structure, found)


@functools.partial(jax.jit, static_argnums=1)
def _rows(leaves: list[jax.Array], size: int) -> jax.Array:
    """Return the slices of several leaves in the order of the ranks."""
    return jnp.concatenate([_parts(divided(leaf, size), size) for leaf in leaves], axis=1).reshape(-1)


def _gathered(slices: Any, like: Any, all_: Collectives, limits: Sequence[int]) -> Any:
    parts, structure = jax.tree.flatten(slices)
    whole, shapes = list(parts), [jnp.shape(leaf) for leaf in jax.tree.leaves(like)]
    for chosen in plan_buckets(parts, [max(1, limit // all_.size) for limit in limits], large_alone=True):
        rows = all_.gather_same(jnp.concatenate([parts[k] for k in chosen]))
        found = _put_together(rows, tuple(parts[k].size for k in chosen), tuple(shapes[k] for k in chosen))
        for k, leaf in zip(chosen, found, strict=True):
            whole[k] = leaf
    return jax.tree.unflatten(structure, whole)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _put_together(rows: jax.Array, lengths: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    ends = list(itertools.accumulate(lengths))[:-1]
    flat = [part.reshape(-1) for part in jnp.split(rows, ends, axis=1)]
    return [part[: math.prod(shape)].reshape(shape) for part, shape in zip(flat, shapes, strict=True)]


# Check that a transformation is elementwise: try it on a small tree, whole and in slices.

STEPS = 40  # at most: the first updates may be zero, in optax.MultiSteps or under a schedule that warms up
VALUE = np.float32(1)  # of the loss, for optax.contrib.reduce_on_plateau
SIDE = 128  # the size of dimensions from which optax.scale_by_factored_rms factors second moments


def require_elementwise(tx: optax.GradientTransformationExtraArgs, params: Any) -> None:
    """Raise ValueError for a transformation that is not elementwise. Of ``params`` only structure and shapes matter."""
    try:
        with jax.ensure_compile_time_eval(), jax.debug_nans(False):  # noqa: FBT003  a NaN is among the gradients
            where = _differing(tx, jax.tree.map(_small, params))
    except Exception as error:
        raise ValueError(
            f"shard_state: the transformation failed on a small tree, {type(error).__name__}: {error}. It is tried "
            "there before it gets slices. If it is elementwise, use shard_state(tx, try_first=False)."
        ) from error
    if where is not None:
        raise ValueError(
            "shard_state: this transformation does something else to a slice of a parameter than to the whole (seen at "
            f"{where}), so the ranks would train otherwise than one process. It looks at whole leaves, at all of them "
            "together, or at their shapes, as clipping by norm, lamb, lars, adafactor, centralize, apply_if_finite, "
            "noise and masks by ndim do. Clip by shard_state(tx, max_global_norm=...), and put the rest in front: "
            "optax.chain(jd.average_gradients(), first, jd.shard_state(elementwise))."
        )


def _differing(tx: Any, params: Any) -> str | None:
    """Return the path where the update of a leaf's second half differs from that of the whole leaf; None if nowhere.

    To detect clipping, some gradients are much larger; to detect optax.apply_if_finite, one ends as NaN.
    """
    half = jax.tree.map(_second_half, params)
    states, moved = [tx.init(params), tx.init(half)], 0

    @jax.jit
    def update(gradients: Any, states: Any) -> Any:
        whole, of_whole = tx.update(gradients, states[0], params, value=VALUE)
        cut, of_half = tx.update(jax.tree.map(_second_half, gradients), states[1], half, value=VALUE)
        return jax.tree.map(jnp.ravel, whole), cut, [of_whole, of_half]

    for step in range(STEPS):
        gradients = _gradients(params, step, scale=1e4 if moved else 1.0, with_nan=moved == 2)
        updates, of_half, states = update(gradients, states)
        found = list(map(np.asarray, jax.tree.leaves(updates)))
        for (path, cut), one in zip(jax.tree_util.tree_leaves_with_path(of_half), found, strict=True):
            largest = np.max(np.abs(one), initial=0, where=np.isfinite(one))
            expected = one[one.size - cut.size :]
            if not np.allclose(expected, cut, rtol=1e-3, atol=1e-6 * largest, equal_nan=True):
                return jax.tree_util.keystr(path) or "the parameter"
        moved += any(np.any(one != 0) for one in found)
        if moved == 3:
            break
    return None


def _small(leaf: Any) -> np.ndarray:
    """Return a small leaf of as many dimensions. The last two may be large, for factored moments."""
    sizes = jnp.shape(leaf)
    most = [3] * (len(sizes) - 2) + [SIDE, SIDE] if len(sizes) > 1 else [3]
    shape = tuple(map(min, sizes, most))
    kind = leaf.dtype if jnp.issubdtype(jnp.result_type(leaf), jnp.integer) else np.float32
    return np.cos(np.arange(np.prod(shape, dtype=int)) + len(shape)).reshape(shape).astype(kind)


def _gradients(params: Any, step: int, *, scale: float, with_nan: bool) -> Any:
    leaves, structure = jax.tree.flatten(params)
    waves = [scale * np.sin(1.7 * np.arange(leaf.size) + step + k) for k, leaf in enumerate(leaves)]
    found = [wave.reshape(leaf.shape).astype(leaf.dtype) for wave, leaf in zip(waves, leaves, strict=True)]
    largest = max(found, key=np.size, default=np.zeros(0, int))
    if with_nan and largest.dtype == np.float32:
        largest.reshape(-1)[0] = np.nan
    return jax.tree.unflatten(structure, found)


def _second_half(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(-1)[leaf.size // 2 :]
