"""What optax lacks: functions of any of its transformations, and of their states."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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
