"""Averaging inside one compiled step: pure, for every body of the collectives, synchronous."""

from collections.abc import Sequence
from typing import Any

import jax

from jdistgrad.data_parallel.collectives import Collectives, Mesh
from jdistgrad.data_parallel.hooks import base as hooks
from jdistgrad.data_parallel.layout import Bucket, join_flat


def is_traced(tree: Any) -> bool:
    """Whether any leaf stands for an array that is not there yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def localized(collectives: Collectives, args: tuple, argnums: int | Sequence[int]) -> list[Any]:
    """Arguments of which those to be differentiated are this rank's own: see ``Mesh.localize``."""
    if not isinstance(collectives, Mesh):
        return list(args)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return [jax.tree.map(collectives.localize, arg) if k in chosen else arg for k, arg in enumerate(args)]


def average(
    gradients: Sequence[Any], buckets: Sequence[Bucket], hook: hooks.Hook, states: Sequence[Any], all_: Collectives
) -> tuple[list[Any], list[Any]]:
    """The averages of gradients over all ranks, by leaf, and the hook's new states, by bucket.

    On a mesh, what JAX has summed already (gradients of parameters typed as replicated) is only divided.
    """
    averaged, after = list(gradients), []
    for bucket, state in zip(buckets, states, strict=True):
        slots = [slot for slot in bucket.slots if not is_summed(averaged[slot.index], all_)]
        for slot in bucket.slots:
            if slot not in slots:
                averaged[slot.index] = averaged[slot.index] / all_.size
        if len(slots) == len(bucket.slots):
            flat = join_flat([averaged[slot.index] for slot in slots])
            flat, state = hooks.reduce(hook, bucket.filled(flat, all_.size), state, all_)
            for slot, value in zip(slots, bucket.views(flat), strict=True):
                averaged[slot.index] = value
        else:
            for slot in slots:
                averaged[slot.index] = all_.allreduce(averaged[slot.index] / all_.size)
        after.append(state)
    return averaged, after


def is_summed(gradient: Any, collectives: Collectives) -> bool:
    return isinstance(collectives, Mesh) and collectives.is_summed(gradient)
