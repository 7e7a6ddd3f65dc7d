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

from jdistgrad.autograd.callee.functions import gradient_layout
from jdistgrad.autograd.tape.contributions import or_zero
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.autograd.values.holes import Hole, Layout, has_gradient, only_floats
from jdistgrad.errors import DifferentiationError
from jdistgrad.optim import restoring
from jdistgrad.rpc.references.rref import RRef
from jdistgrad.rpc.worker import Worker, current_worker

LEAF = jax.tree.structure(0)

Saved = dict[str, dict[int, Any]]  # an owner's part of a saved state: "values" and "states", by their places in it

_locks: "weakref.WeakKeyDictionary[Worker, threading.Lock]" = weakref.WeakKeyDictionary()


class Inspection(NamedTuple):
    """An owner's report on its gradients, before anything is changed."""

    squared_norm: float
    finite: bool


class Value(NamedTuple):
    """A reference's value, taken apart: its float arrays, their tree, and the layout of the whole value around them."""

    leaves: list[Any]
    tree: Any
    layout: Layout

    @classmethod
    def of(cls, whole: Any) -> "Value":
        if isinstance(whole, jax.Array) and has_gradient(whole):
            return cls([whole], LEAF, Layout(Hole(), (0,)))
        layout, leaves = gradient_layout(whole)
        return cls(leaves, jax.tree.structure(only_floats(whole)), layout)


class OwnedParameters:
    """The values of some references on their owner, and an optax transformation's state for these values."""

    def __init__(self, packed: bytes, rrefs: Sequence[RRef[Any]]):
        self._rrefs, self._owned = list(rrefs), current_worker().references.owned
        self._lock = _locks.setdefault(current_worker(), threading.Lock())
        transformation, values = cloudpickle.loads(packed), [Value.of(rref.local_value()) for rref in rrefs]
        self._state = transformation.init([jax.tree.unflatten(one.tree, one.leaves) for one in values])

        def update(trees: Any, gradients: Any, state: Any, parameters: Any, scale: Any) -> tuple[Any, Any]:
            scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), _unflattened(trees, gradients))
            parameters = _unflattened(trees, parameters)
            updates, state = transformation.update(scaled, state, parameters)
            return [jax.tree.leaves(one) for one in optax.apply_updates(parameters, updates)], state

        self._update = jax.jit(update, static_argnums=0)

    def inspect_gradients(self) -> Inspection:
        """Return the gradients' squared norm, and whether they are finite. Raise if a gradient is missing."""
        found = self._gradients([one.leaves for one in self._current()])
        leaves = [jnp.asarray(leaf) for leaves in found for leaf in leaves]
        squares = [jnp.sum(jnp.abs(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))) ** 2) for leaf in leaves]
        return Inspection(float(sum(squares)), bool(all(jnp.all(jnp.isfinite(leaf)) for leaf in leaves)))

    def step(self, scale: float) -> None:
        """Update the values with their gradients in the current context."""
        with self._lock:
            values = self._current()
            parameters = [one.leaves for one in values]
            trees, gradients = tuple(one.tree for one in values), self._gradients(parameters)
            found, self._state = self._update(trees, gradients, self._state, parameters, np.float32(scale))
            for rref, value, leaves in zip(self._rrefs, values, found, strict=True):
                self._owned.replace(rref.id, value.layout.fill(leaves))

    def state(self) -> tuple[list[Any], Any]:
        """Return the values and the transformation's state, consistent with each other."""
        with self._lock:
            return [rref.local_value() for rref in self._rrefs], self._state

    def prepare(self, saved: Saved) -> Saved:
        """Check that saved values and state fit the current ones; return them for ``put_back``. Changes nothing."""
        values, state = self.state()
        known = {
            "values": dict(zip(saved["values"], values, strict=True)),
            "states": dict.fromkeys(saved["states"], state),
        }
        differs = restoring.difference(saved, known)
        if differs is not None:
            raise ValueError(
                f"restore on {current_worker().info}: {differs}. Nothing was restored on any worker. Restore what "
                "state() gave of an optimizer of the same values and the same transformation."
            )
        return restoring.converted(saved, known)

    def put_back(self, prepared: Saved) -> None:
        with self._lock:
            (self._state,) = prepared["states"].values()
            for rref, value in zip(self._rrefs, prepared["values"].values(), strict=True):
                self._owned.replace(rref.id, value)

    def _current(self) -> list[Value]:
        """Return the current values, taken apart: others may have replaced them, or changed their contents."""
        return [Value.of(self._owned.value(rref.id).result()) for rref in self._rrefs]

    def _gradients(self, parameters: Sequence[list[Any]]) -> list[list[Any]]:
        """Return the gradients of each parameter's leaves: zero where nothing was contributed to a leaf."""
        tape = current_tape(lambda: "an optimizer's step")
        found = [tape.gradient(rref.id) for rref in self._rrefs]
        missing = [str(rref) for rref, gradient in zip(self._rrefs, found, strict=True) if gradient is None]
        if missing:
            raise DifferentiationError(
                f"the optimizer has no gradient of {', '.join(missing)} in this context. Differentiate a function of "
                "it in the context first, or leave the reference out of the optimizer.",
                missing=missing,
            )
        each = zip(found, parameters, strict=True)
        return [[or_zero(*both) for both in zip(mine or (), leaves, strict=True)] for mine, leaves in each]


def _unflattened(trees: Any, leaves: Any) -> list[Any]:
    return [jax.tree.unflatten(tree, mine) for tree, mine in zip(trees, leaves, strict=True)]


# The functions that the optimizer calls on owners. The optimizer holds a reference to the parameters: an id is enough.


def own_parameters(packed: bytes, rrefs: Sequence[Any]) -> OwnedParameters:
    return OwnedParameters(packed, rrefs)


def _known(identifier: int) -> OwnedParameters:
    found: OwnedParameters = current_worker().references.owned.value(identifier).result()
    return found


def inspect_gradients(identifier: int) -> Inspection:
    return _known(identifier).inspect_gradients()


def step(identifier: int, scale: float) -> None:
    _known(identifier).step(scale)


def state(identifier: int) -> tuple[list[Any], Any]:
    return _known(identifier).state()


def prepare(identifier: int, saved: Saved) -> Saved:
    return _known(identifier).prepare(saved)


def put_back(identifier: int, prepared: int) -> None:
    _known(identifier).put_back(current_worker().references.owned.value(prepared).result())
