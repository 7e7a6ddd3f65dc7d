"""Optimizer state divided among the ranks: ZeRO stage 1.

Rajbhandari et al., "ZeRO" (SC 2020). Each rank keeps the state of its slice of every flattened parameter and computes
that slice's update, then all ranks gather the updates. The state has the parameters' tree, so masks by path work as
without sharding. Guarantee: the same updates as without sharding, for optimizers that treat each element by itself
(sgd, momentum, adam, rmsprop, weight decay). Weakness: transformations that look at whole leaves or their shapes (lars,
adafactor, clipping by norm) see slices; put them in front of the sharded part.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistgrad.data_parallel.buckets.bucket import join_flat
from jdistgrad.data_parallel.collectives import Collectives
from jdistgrad.data_parallel.collectives.default import shared


def shard_state(
    tx: optax.GradientTransformation, collectives: Collectives | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose state is divided among the ranks.

    Every rank must call ``init`` and ``update`` with the same parameters and averaged gradients. A rank's state is of
    use to that rank only: save the state of every rank, and restore it on equally many ranks.

    Arguments:
      tx: an optimizer that treats each element by itself.
      collectives: the ranks that share the state; default all workers of this world. On a mesh, ``init`` runs inside
        ``shard_map`` too, and the state is sharded over the axis.

    Example:
      >>> tx = optax.chain(jd.average_gradients(), shard_state(optax.adam(1e-3)))
    """
    inner = optax.with_extra_args_support(tx)

    def group() -> Collectives:
        return shared() if collectives is None else collectives

    def init(params: Any) -> Any:
        return inner.init(_slices(params, group()))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        all_ = group()
        mine = None if params is None else _slices(params, all_)
        slices, state = inner.update(_slices(updates, all_), state, mine, **extra)
        return _gathered(slices, updates, all_), state

    return optax.GradientTransformationExtraArgs(init, update)


def _slices(tree: Any, all_: Collectives) -> Any:
    """Return this rank's part of each leaf, flattened and padded so that all parts are equal in size."""
    return _cut(tree, jnp.asarray(all_.rank), all_.size)


@functools.partial(jax.jit, static_argnums=2)
def _cut(tree: Any, rank: jax.Array, size: int) -> Any:
    def part(leaf: Any) -> jax.Array:
        flat = jnp.ravel(leaf)
        length = -(-flat.size // size)
        return jax.lax.dynamic_slice_in_dim(jnp.pad(flat, (0, length * size - flat.size)), rank * length, length)

    return jax.tree.map(part, tree)


def _gathered(slices: Any, like: Any, all_: Collectives) -> Any:
    """Gather the parts of all ranks into whole leaves; leaves of one dtype travel together."""
    parts, structure = jax.tree.flatten(slices)
    whole, shapes = list(parts), [jnp.shape(leaf) for leaf in jax.tree.leaves(like)]
    for dtype in dict.fromkeys(part.dtype for part in parts):
        chosen = [k for k, part in enumerate(parts) if part.dtype == dtype]
        rows = all_.gather_same(join_flat([parts[k] for k in chosen]))
        found = _put_together(rows, tuple(parts[k].size for k in chosen), tuple(shapes[k] for k in chosen))
        for k, leaf in zip(chosen, found, strict=True):
            whole[k] = leaf
    return jax.tree.unflatten(structure, whole)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _put_together(rows: jax.Array, lengths: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    ends = list(itertools.accumulate(lengths))[:-1]
    flat = [part.reshape(-1) for part in jnp.split(rows, ends, axis=1)]
    return [part[: math.prod(shape)].reshape(shape) for part, shape in zip(flat, shapes, strict=True)]
