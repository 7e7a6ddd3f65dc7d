"""What an optimizer's step does to all of its values, as one transformation: clip, test, update, apply."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdistgrad.errors import DifferentiationError
from jdistgrad.optim.optax_extras import scaled_down, sum_of_squares


class StepState(NamedTuple):
    """The state of the user's transformation, and whether each owner's last gradients were finite, if that is asked."""

    inner: Any
    finite: list[Any]


@dataclasses.dataclass(frozen=True)
class Stepping:
    """A transformation whose updates are the new parameters.

    Arguments:
      tx: the user's transformation.
      max_norm: scale gradients down to a norm, over all owners, of at most this.
      tested: for each owner whose gradients must be finite: the numbers of its values.
    """

    tx: optax.GradientTransformation
    max_norm: float | None
    tested: Mapping[str, Sequence[int]]

    def init(self, params: Sequence[Any]) -> StepState:
        return StepState(self.tx.init(params), [True] * len(self.tested))

    def update(
        self, gradients: Sequence[Any], state: StepState, params: Sequence[Any], **extra: Any
    ) -> tuple[Any, StepState]:
        tested = (jax.tree.leaves([gradients[k] for k in mine]) for mine in self.tested.values())
        finite = [jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) for leaves in tested]
        if self.max_norm is not None:
            gradients = scaled_down(gradients, sum_of_squares(gradients), self.max_norm)
        updates, inner = self.tx.update(gradients, state.inner, params, **extra)
        # Some of optax's updates of numbers have a dimension (scale_by_distance_over_gradients).
        updates = jax.tree.map(lambda one, like: jnp.reshape(one, like.shape), updates, params)
        return optax.apply_updates(params, updates), StepState(inner, finite)

    def require_finite(self, finite: Sequence[Any]) -> None:
        bad = [owner for owner, one in zip(self.tested, finite, strict=True) if not one]
        if bad:
            raise DifferentiationError(f"a gradient on {', '.join(bad)} is not finite: no step was made", workers=bad)
