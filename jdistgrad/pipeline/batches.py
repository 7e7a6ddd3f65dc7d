"""Split a batch into microbatches, and join their results."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.data_parallel.averages import host_device
from jdistgrad.rpc.current import once_for_all
from jdistgrad.rpc.rref import RRef


@dataclasses.dataclass(frozen=True)
class whole:  # noqa: N801 used like a function
    """Mark a step's argument, or a part of one, that is not split: every microbatch gets all of it."""

    value: Any


def sizes_of(batch: tuple[Any, ...], targets: tuple[Any, ...], microbatches: int) -> list[int]:
    """Return the sizes of the microbatches: they differ by one at most, larger first. Checks the arguments."""
    rows = _rows_of((batch, targets))
    if rows is None and microbatches > 1:
        raise ValueError(
            f"nothing in the batch is split into the {microbatches} microbatches: all would be the same. Pass an array "
            "that is not whole, or use a schedule of one microbatch."
        )
    rows = microbatches if rows is None else rows
    if rows < microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {microbatches} microbatches. Use fewer, or a larger batch."
        )
    return [rows // microbatches + (k < rows % microbatches) for k in range(microbatches)]


def _rows_of(given: Any) -> int | None:
    """Return the length of all arrays that are split, or None if there are none."""
    first = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda one: isinstance(one, whole | RRef)):
        if isinstance(leaf, RRef):
            raise TypeError(
                f"{_named(path)} is a reference, {leaf}, but a step splits arrays. Pass the value, "
                "reference.to_here(), or make it the parameters of a first stage, so that it stays on its owner."
            )
        if isinstance(leaf, whole):
            continue
        if not np.shape(leaf):
            raise ValueError(
                f"{_named(path)} is {leaf!r:.60}, which has no first axis to split. To give it to every microbatch: "
                "jd.pipeline.whole(value)."
            )
        first = first or (path, len(leaf))
        if len(leaf) != first[1]:
            raise ValueError(
                f"the arrays of a batch have one length: {_named(path)} has {len(leaf)} rows, {_named(first[0])} has "
                f"{first[1]}. To give one to every microbatch: jd.pipeline.whole(value)."
            )
    return None if first is None else first[1]


def split(arguments: tuple[Any, ...], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the arguments of each microbatch. ``sizes``: from ``sizes_of``."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, whole))
    ends = [0, *itertools.accumulate(sizes)]
    pieces = []
    for leaf in leaves:
        if isinstance(leaf, whole):
            pieces.append([leaf.value] * len(sizes))
            continue
        if isinstance(leaf, jax.Array) and isinstance(leaf.dtype, np.dtype) and host_device(leaf.sharding) is not None:
            leaf = np.asarray(leaf)  # its slices are the same memory; JAX would compile a program for each
        pieces.append([leaf[start:end] for start, end in itertools.pairwise(ends)])
    return [jax.tree.unflatten(tree, [mine[k] for mine in pieces]) for k in range(len(sizes))]


def _named(path: Any) -> str:
    which, number, *rest = path
    inside = jax.tree_util.keystr(tuple(rest))
    return f"targets={inside}" if which.idx else f"argument {number.idx}{inside} of the step"


def joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the results of all microbatches along their first axis.

    Blocks until they are computed: results may be views of the caller's batch, which the caller may change.
    """
    together = jax.tree.map(lambda *one: jnp.concatenate(one) if np.ndim(one[0]) else jnp.stack(one), *outputs)
    return jax.block_until_ready(together)


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum of the microbatches' losses, in order.

    Sums in 64 bits: with 8 or 11 (bfloat16, float16), small terms would not change a large sum.
    """
    found = np.asarray(_stacked(values))  # to read each by itself takes several times as long
    total = sum(weight * value for value, weight in zip(found.tolist(), weights, strict=True))
    return np.asarray(total, found.dtype)


_stacked = once_for_all(jax.jit(jnp.stack))
