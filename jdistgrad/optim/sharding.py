"""Optimizer state divided among the ranks: ZeRO stage 1.

Rajbhandari et al., "ZeRO" (SC 2020). Each rank keeps the state of its slice of all parameters laid end to end, computes
that slice's update, and everybody gathers the updates. Guarantee: the same updates as unsharded, for optimizers that
treat each element by itself (sgd, momentum, adam, rmsprop, weight decay). Weakness: what looks at whole leaves (lars,
adafactor, clipping by norm) sees slices; put it in front of the sharded part.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdistgrad.data_parallel.collectives import Collectives, Mesh
from jdistgrad.data_parallel.collectives.default import shared

Slices = dict[str, jax.Array]


def shard_state(
    tx: optax.GradientTransformation, collectives: Collectives | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is divided among the ranks.

    Every rank must call ``init`` and ``update`` with the same parameters and averaged gradients. The state of a rank is
    of use to that rank only: save each rank's, and restore it on as many.

    Arguments:
      tx: an optimizer that treats each element by itself.
      collectives: which ranks; default all workers of this world. On a mesh, ``init`` runs inside ``shard_map`` too,
        and the state is sharded over the axis.

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


def _by_dtype(leaves: list[jax.Array]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k, leaf in enumerate(leaves):
        found.setdefault(str(leaf.dtype), []).append(k)
    return found


def _slices(tree: Any, all_: Collectives) -> Slices:
    """This rank's part of the leaves of each dtype, laid end to end and padded to equal parts."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    found = {}
    for dtype, indices in _by_dtype(leaves).items():
        flat = jnp.concatenate([leaves[k].reshape(-1) for k in indices])
        part = -(-flat.size // all_.size)
        padded = jnp.pad(flat, (0, part * all_.size - flat.size))
        found[dtype] = jax.lax.dynamic_slice_in_dim(padded, all_.rank * part, part)
    return found


def _gathered(slices: Slices, like: Any, all_: Collectives) -> Any:
    leaves, structure = jax.tree.flatten(like)
    whole: list[Any] = [None] * len(leaves)
    for dtype, indices in _by_dtype([jnp.asarray(leaf) for leaf in leaves]).items():
        flat, offset = _gather(all_)(slices[dtype]).reshape(-1), 0
        for k in indices:
            whole[k] = flat[offset : offset + leaves[k].size].reshape(leaves[k].shape)
            offset += leaves[k].size
    return jax.tree.unflatten(structure, whole)


def _gather(all_: Collectives) -> Any:
    return all_.gather_same if isinstance(all_, Mesh) else all_.allgather
