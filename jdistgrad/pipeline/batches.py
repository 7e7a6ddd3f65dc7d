"""The split of a batch into microbatches, and of what belongs together again."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.wire.arrays import as_jax_array


@dataclasses.dataclass(frozen=True)
class Whole:
    """An argument of a pipeline's step that every microbatch gets as it is: ``jd.pipeline.whole(mask)``."""

    value: Any


def whole(value: Any) -> Whole:
    """Mark an argument of a pipeline's step, or a part of one, that is not split into microbatches."""
    return Whole(value)


def split_batch(
    batch: Sequence[Any], targets: Sequence[Any], microbatches: int
) -> tuple[list[tuple[tuple[Any, ...], tuple[Any, ...]]], list[int]]:
    """Split arguments and targets along the first axis of their arrays; return them and the size of each microbatch.

    The sizes differ by one at most, the larger first.

    Raises:
      ValueError: an array has another length than the others, or there are fewer rows than microbatches.
    """
    given = tuple(batch), tuple(targets)
    leaves, tree = jax.tree_util.tree_flatten_with_path(given, is_leaf=lambda leaf: isinstance(leaf, Whole))
    lengths = {path: _length(path, leaf) for path, leaf in leaves if not isinstance(leaf, Whole)}
    if not lengths and microbatches > 1:
        raise ValueError(
            f"nothing in the batch is split into the {microbatches} microbatches: all would be the same. Give an array "
            "that is not whole, or use a schedule of one microbatch."
        )
    rows = next(iter(lengths.values()), microbatches)
    for path, length in lengths.items():
        if length != rows:
            first = next(iter(lengths))
            raise ValueError(
                f"the arrays of a batch have one length: {_named(path)} has {length} rows, {_named(first)} has {rows}. "
                "Mark what is not split: jd.pipeline.whole(value)."
            )
    if rows < microbatches:
        raise ValueError(
            f"a batch of {rows} rows cannot be split into {microbatches} microbatches. Use a schedule of fewer, or a "
            "larger batch."
        )
    sizes = [rows // microbatches + (k < rows % microbatches) for k in range(microbatches)]
    ends = np.cumsum([0, *sizes])
    return [
        jax.tree.unflatten(
            tree, [one.value if isinstance(one, Whole) else one[ends[k] : ends[k + 1]] for _, one in leaves]
        )
        for k in range(microbatches)
    ], sizes


def _length(path: Any, leaf: Any) -> int:
    if np.ndim(leaf) == 0:
        raise ValueError(
            f"{_named(path)} is {leaf!r:.60}, which has no first axis to split. Mark what every microbatch gets as it "
            "is: jd.pipeline.whole(value)."
        )
    return int(np.shape(leaf)[0])


def _named(path: Any) -> str:
    which, number, *rest = path
    inside = jax.tree_util.keystr(tuple(rest))
    return f"targets={inside}" if which.idx else f"argument {number.idx}{inside} of the step"


def joined(outputs: Sequence[Any]) -> Any:
    """Return the results of all microbatches as one: arrays one after the other along their first axis.

    Waits for them: what passed through the stages is the caller's own memory, which JAX reads late.
    """
    together = jax.tree.map(lambda *one: jnp.concatenate(one) if np.ndim(one[0]) else jnp.stack(one), *outputs)
    return jax.block_until_ready(together)


def weighted_sum(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Return the sum of the microbatches' losses, each with the part of the rows that it has, in order.

    Sums in 64 bits: in 8 or 11, a sum of many small parts would stand still.
    """
    total = sum(weight * float(value) for value, weight in zip(values, weights, strict=True))
    # NumPy makes the array: JAX takes twice as long to make one of a Python number.
    return jnp.asarray(np.asarray(total, jnp.result_type(values[0])))


def in_jax(tree: Any) -> Any:
    """Return a tree with its NumPy arrays as arrays of JAX."""
    return jax.tree.map(lambda leaf: as_jax_array(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
