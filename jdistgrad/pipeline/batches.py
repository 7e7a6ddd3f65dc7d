"""The split of a batch into microbatches, and of what belongs together again."""

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
    """Mark an argument of a pipeline's step, or a part of one, that is not split: every microbatch gets it as it is."""

    value: Any


def sizes_of(batch: tuple[Any, ...], targets: tuple[Any, ...], microbatches: int) -> list[int]:
    """Return the size of each microbatch of arguments and targets: they differ by one at most, the larger first.

    Raises:
      TypeError: something in the batch is a reference, or no array.
      ValueError: an array has another length than the others, or there are fewer rows than microbatches.
    """
    rows = _rows_of((batch, targets))
    if rows is None and microbatches > 1:
        raise ValueError(
            f"nothing in the batch is split into the {microbatches} microbatches: all would be the same. Give an array "
            "that is not whole, or use a schedule of one microbatch."
        )
    rows = microbatches if rows is None else rows
    if rows < microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {microbatches} microbatches. Use a schedule of fewer, or a "
            "larger batch."
        )
    return [rows // microbatches + (k < rows % microbatches) for k in range(microbatches)]


def _rows_of(given: Any) -> int | None:
    """Return the length of all arrays that are split, or None if there are none."""
    first = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(given, is_leaf=lambda one: isinstance(one, whole | RRef)):
        if isinstance(leaf, RRef):
            raise TypeError(
                f"{_named(path)} is a reference, {leaf}, but a step splits arrays. Give it a copy of the value, "
                "reference.to_here(), or make the value the parameters of a first stage, where it stays on its owner."
            )
        if isinstance(leaf, whole):
            continue
        if not np.shape(leaf):
            raise ValueError(
                f"{_named(path)} is {leaf!r:.60}, which has no first axis to split. Mark what every microbatch gets as "
                "it is: jd.pipeline.whole(value)."
            )
        first = first or (path, len(leaf))
        if len(leaf) != first[1]:
            raise ValueError(
                f"the arrays of a batch have one length: {_named(path)} has {len(leaf)} rows, {_named(first[0])} has "
                f"{first[1]}. Mark what is not split: jd.pipeline.whole(value)."
            )
    return None if first is None else first[1]


def split(arguments: tuple[Any, ...], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return each microbatch of arguments, whose sizes are those of ``sizes_of``."""
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
    """Return the results of all microbatches as one: arrays one after the other along their first axis.

    Waits for them: what passed through the stages unchanged is the caller's own memory, which it may change.
    """
    together = jax.tree.map(lambda *one: jnp.concatenate(one) if np.ndim(one[0]) else jnp.stack(one), *outputs)
    return jax.block_until_ready(together)


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> np.ndarray:
    """Return the sum of the microbatches' losses, each with the part of the rows that it has, in order.

    Sums in 64 bits: in 8 or 11, a sum of many small parts would stand still.
    """
    found = np.asarray(_stacked(values))  # to read each by itself takes several times as long
    total = sum(weight * value for value, weight in zip(found.tolist(), weights, strict=True))
    return np.asarray(total, found.dtype)


_stacked = once_for_all(jax.jit(jnp.stack))
