"""The owner's side of an optimizer: the parameters that live on one worker, and the state that belongs to them."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.autograd.derived import gradient_layout
from jdistgrad.autograd.exchange import value_gradient
from jdistgrad.autograd.layout import has_gradient
from jdistgrad.errors import DifferentiationError
from jdistgrad.rpc import trees
from jdistgrad.rpc.current import current_worker
from jdistgrad.rpc.references import RRef
from jdistgrad.rpc.worker import Worker

_locks: "weakref.WeakKeyDictionary[Worker, threading.Lock]" = weakref.WeakKeyDictionary()


class Finding(NamedTuple):
    """What an owner says of its gradients before anything is changed."""

    squared_norm: float
    finite: bool


class OwnedParameters:
    """Some references' values on their owner, and an optax transformation's state for them."""

    def __init__(self, packed: bytes, rrefs: Sequence[RRef]):
        self._rrefs, transformation = list(rrefs), cloudpickle.loads(packed)
        self._state = transformation.init(self._parameters())
        self._lock = _locks.setdefault(current_worker(), threading.Lock())

        def update(gradients: Any, state: Any, parameters: Any, scale: Any) -> tuple[Any, Any]:
            scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
            updates, state = transformation.update(scaled, state, parameters)
            return optax.apply_updates(parameters, updates), state

        self._update = jax.jit(update)

    def look(self) -> Finding:
        """The gradients' squared norm, and whether they are finite. Raises where one is missing."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(self._gradients())]
        squares = [jnp.sum(jnp.abs(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))) ** 2) for leaf in leaves]
        return Finding(float(sum(squares)), bool(all(jnp.all(jnp.isfinite(leaf)) for leaf in leaves)))

    def step(self, scale: float) -> None:
        """Update the values, with the gradients that the context this code runs in holds for them."""
        gradients = self._gradients()
        with self._lock:
            parameters, self._state = self._update(gradients, self._state, self._parameters(), np.float32(scale))
            self._set(parameters)

    def state(self) -> tuple[list[Any], Any]:
        """The values and the transformation's state, of one moment."""
        with self._lock:
            return [rref.local_value() for rref in self._rrefs], self._state

    def restore(self, values: Sequence[Any], state: Any) -> None:
        known_values, known_state = self.state()
        _check_structure("values", list(values), known_values)
        _check_structure("state", state, known_state)
        with self._lock:
            self._state = _at_home(state)
            for rref, value in zip(self._rrefs, values, strict=True):
                current_worker().owned.replace(rref.id, _at_home(value))

    def _parameters(self) -> list[Any]:
        return [_only_floats(rref.local_value()) for rref in self._rrefs]

    def _gradients(self) -> list[Any]:
        found = [(rref, value_gradient(rref.id)) for rref in self._rrefs]
        missing = [str(rref) for rref, gradient in found if gradient is None]
        if missing:
            raise DifferentiationError(
                f"the optimizer has no gradient of {', '.join(missing)} in this context. Differentiate a function of "
                "it in the context first, or leave the reference out of the optimizer.",
                missing=missing,
            )
        return [_only_floats(gradient) for _, gradient in found]

    def _set(self, parameters: Sequence[Any]) -> None:
        for rref, new in zip(self._rrefs, parameters, strict=True):
            layout, _ = gradient_layout(rref.local_value())
            current_worker().owned.replace(rref.id, layout.fill(jax.tree.leaves(new)))


def _check_structure(name: str, new: Any, known: Any) -> None:
    found: Any = jax.tree.structure(new)
    expected: Any = jax.tree.structure(known)
    if found == expected:
        return
    raise ValueError(
        f"restore on {current_worker().info}: the {name} have the structure {found}, not {expected}. Restore what "
        "state() of the same optimizer gave."
    )


def _only_floats(value: Any) -> Any:
    """The value with nothing in the place of what is not optimized."""
    return trees.map_leaves(lambda leaf: leaf if has_gradient(leaf) else None, value)


def _at_home(tree: Any) -> Any:
    """The arrays of a tree on this worker's device; what was restored from a file may be bound to another."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)) if isinstance(leaf, jax.Array) else leaf, tree)


# What the optimizer calls on owners. ``parameters`` arrives as the object itself: it lives there.


def own_parameters(packed: bytes, rrefs: Sequence[Any]) -> OwnedParameters:
    return OwnedParameters(packed, rrefs)


def look(parameters: OwnedParameters) -> Finding:
    return parameters.look()


def step(parameters: OwnedParameters, scale: float) -> None:
    parameters.step(scale)


def state(parameters: OwnedParameters) -> tuple[list[Any], Any]:
    return parameters.state()


def restore(parameters: OwnedParameters, values: Sequence[Any], state: Any) -> None:
    parameters.restore(values, state)
