"""Whether an optax transformation treats each element by itself: it is tried on a small tree, whole and in slices."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 40  # at most: the first updates may be zero, in optax.MultiSteps or under a schedule that warms up
VALUE = np.float32(1)  # of the loss, for optax.contrib.reduce_on_plateau
SIDE = 128  # the size of dimensions from which optax.scale_by_factored_rms factors second moments


def require_elementwise(tx: optax.GradientTransformationExtraArgs, params: Any) -> None:
    """Raise ValueError for a transformation that does something else to a slice of a leaf than to the whole leaf.

    Arguments:
      params: a tree of which only the structure and the shapes matter.
    """
    where = None
    try:
        with jax.ensure_compile_time_eval():
            where = next(
                (path for path, *both in _compared(tx, jax.tree.map(_small, params)) if not _alike(*both)), None
            )
    except Exception as error:
        raise ValueError(
            f"shard_state: the transformation failed on a small tree, {type(error).__name__}: {error}. It is tried "
            "there before it gets slices. If it treats each element by itself, leave that out: "
            "shard_state(tx, try_first=False)."
        ) from error
    if where is not None:
        raise ValueError(
            "shard_state: this transformation does something else to a slice of a parameter than to the whole (seen at "
            f"{jax.tree_util.keystr(where) or 'the parameter'}), so the ranks would train otherwise than one process. "
            "It looks at whole leaves, at all of them together, or at their shapes, as clipping by norm, lamb, lars, "
            "adafactor, centralize, apply_if_finite, noise and masks by ndim do. Clip by shard_state(tx, "
            "max_global_norm=...), and put the rest in front: optax.chain(jd.average_gradients(), first, "
            "jd.shard_state(elementwise))."
        )


def _alike(whole: np.ndarray, half: np.ndarray) -> bool:
    largest = np.max(np.abs(whole), initial=0, where=np.isfinite(whole))
    return np.allclose(whole[whole.size - half.size :], half, rtol=1e-3, atol=1e-6 * largest, equal_nan=True)


def _compared(tx: Any, params: Any) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yield, for each leaf of each update, its path, the update of the whole leaf, and that of its second half alone.

    Some gradients are much larger, which clipping clips. At last one in a first half is not a number, which
    optax.apply_if_finite looks for in all leaves.
    """
    half = jax.tree.map(_second_half, params)
    states, moved = [tx.init(params), tx.init(half)], 0

    @jax.jit
    def update(gradients: Any, states: Any) -> Any:
        pairs = (gradients, params), (jax.tree.map(_second_half, gradients), half)
        found = [tx.update(one, state, mine, value=VALUE) for (one, mine), state in zip(pairs, states, strict=True)]
        return [one for one, _ in found], [state for _, state in found]

    for step in range(STEPS):
        gradients = _gradients(params, step, scale=1e4 if moved else 1.0, with_nan=moved == 2)
        (updates, of_half), states = update(gradients, states)
        found = [np.ravel(leaf) for leaf in jax.tree.leaves(updates)]
        for (path, cut), one in zip(jax.tree_util.tree_flatten_with_path(of_half)[0], found, strict=True):
            yield path, one, np.asarray(cut)
        moved += any(np.any(one != 0) for one in found)
        if moved == 3:
            return


def _small(leaf: Any) -> np.ndarray:
    """Return numbers in a leaf of as many dimensions: the last two of a matrix may be large, others get small."""
    sizes = jnp.shape(leaf)
    shape = tuple(
        min(size, SIDE if len(sizes) > 1 and axis >= len(sizes) - 2 else 3) for axis, size in enumerate(sizes)
    )
    kind = leaf.dtype if jnp.issubdtype(jnp.result_type(leaf), jnp.integer) else np.float32
    return np.cos(np.arange(np.prod(shape, dtype=int)) + len(shape)).reshape(shape).astype(kind)


def _gradients(params: Any, step: int, *, scale: float, with_nan: bool) -> Any:
    leaves, structure = jax.tree.flatten(params)
    found = [
        (scale * np.sin(1.7 * np.arange(leaf.size) + step + k)).reshape(leaf.shape).astype(leaf.dtype)
        for k, leaf in enumerate(leaves)
    ]
    largest = max(found, key=np.size, default=np.zeros(0, int))
    if with_nan and largest.dtype == np.float32:
        largest.reshape(-1)[0] = np.nan
    return jax.tree.unflatten(structure, found)


def _second_half(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(-1)[leaf.size // 2 :]
