"""What optax lacks: functions of any of its transformations, and of their states."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_static  # no leaf: a transformation's init passes it on instead of making zeros like it
@dataclasses.dataclass(frozen=True)
class _Place:
    """A parameter's place among the leaves."""

    number: int


def on_parameters(
    tx: optax.GradientTransformation | optax.MultiSteps, function: Callable[[Any, Any], Any], state: Any, params: Any
) -> Any:
    """Apply a function to each leaf of a state that belongs to a parameter, and to that parameter.

    What is masked in the state (``optax.masked``, ``optax.multi_transform``) stays masked. Unlike
    ``optax.tree_map_params``, functions that make masks or labels get a tree of the parameters' structure.
    """
    leaves, structure = jax.tree.flatten(params)
    marked: Any = tx.init(jax.tree.unflatten(structure, [_Place(number) for number in range(len(leaves))]))

    def apply(mark: Any, part: Any) -> Any:
        belongs = isinstance(mark, _Place) and not isinstance(part, optax.MaskedNode)
        return function(part, leaves[mark.number]) if belongs else part

    return jax.tree.map(apply, marked, state, is_leaf=lambda node: isinstance(node, _Place))


def with_extra_arguments(
    tx: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose ``update`` takes extra arguments, and leaves them out if ``tx`` takes none.

    ``optax.with_extra_args_support``, and ``MultiSteps.gradient_transformation``, leave them out for ``MultiSteps``.
    """
    if isinstance(tx, optax.MultiSteps):
        return optax.GradientTransformationExtraArgs(tx.init, tx.update)
    return optax.with_extra_args_support(tx)


@jax.jit
def sum_of_squares(tree: Any) -> Any:
    """Return the square of a tree's norm; narrow floats are squared in float32."""
    wide = [leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf for leaf in jax.tree.leaves(tree)]
    return sum(jnp.sum(jnp.abs(leaf) ** 2) for leaf in wide)


@jax.jit
def scaled_down(tree: Any, squares: Any, most: float) -> Any:
    """Scale a tree down to a norm of ``most``, as ``optax.clip_by_global_norm`` does. ``squares``: of the whole."""
    factor = most / jnp.maximum(jnp.sqrt(squares), most)
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), tree)
