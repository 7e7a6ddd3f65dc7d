"""The owner's side of an optimizer: the parameters on one worker, and what belongs to them of its state."""

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.autograd.callee.functions import own_parts
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.errors import DifferentiationError
from jdistgrad.optim.division import HERE
from jdistgrad.optim.owners_plan import Method, Plan, by_leaf
from jdistgrad.optim.values import Value, ValueForm, converted, difference, fits
from jdistgrad.rpc.functions import ServedFunction, shown_as
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker

Gradient = Sequence[Any]  # of one value: an array for each of its float arrays, or None

Saved = dict[str, dict[Any, Any]]  # an owner's part of a saved state: "values" by numbers, "state": leaves by names


@shown_as("the start of an optimizer on an owner")
class OwnedParameters:
    """The values of some references on their owner, and what belongs here of an optimizer's state.

    Arguments:
      plan: that of all the optimizer's values. Its transformation is a ``Stepping``.
      rrefs: the references, by their numbers in the optimizer.
    """

    def __init__(self, plan: Plan, rrefs: Mapping[int, RRef[Any]]):
        self._plan, self._rrefs, self._here = plan, rrefs, current_worker().rank
        self._owned = current_worker().references.owned
        self._lock = current_worker().kept.setdefault("optimizers", threading.Lock())
        self._forms = [ValueForm() for _ in rrefs]
        self._trees = [plan.pieces[number].structure for number in rrefs]
        self._own = [own_parts(rref.local_value()) for rref in rrefs.values()]
        # Which leaves of all parameters, and of the whole state, are here.
        self._mine = [k for k, place in enumerate(by_leaf(plan.pieces)) if place == self._here]
        self._mine_of_state = [k for k, place in enumerate(by_leaf(plan.state_pieces)) if place in (self._here, HERE)]
        self.names = state_names(plan)
        self._names = [self.names[k] for k in self._mine_of_state if k < len(self.names)]
        self._state: list[Any] = []

    def carry_out(self, gradients: Sequence[Gradient], method: Method, number: int, given: Sequence[Any]) -> Any:
        """Carry out this owner's part of a round; return the bytes of what other owners get.

        Arguments:
          gradients: of the values; none if the method is ``init``.
          given: extra arguments of the transformation, such as the loss; then what owners sent in earlier rounds.
        """
        division, extra = self._plan.division(method), len(method.extra)
        part = division.rounds[number][self._here]
        with self._lock:
            values = self._values()
            inputs = self._inputs(values, gradients, given[:extra])
            known = {k: one for k, one in enumerate(inputs) if one is not None}
            made, sent = part.compute(known, given[extra:])
            if division.is_last(number, self._here):
                everything = made | division.literals
                self._take([everything.get(k) for k in division.outputs], values)
        return np.asarray(sent)

    def _inputs(self, values: Sequence[Value], gradients: Sequence[Gradient], extra: Sequence[Any]) -> list[Any]:
        """Return the inputs of a method, with None for what other owners have."""
        leaves, count = [leaf for one in values for leaf in one.leaves], len(self._plan.shapes)
        parameters = _spread(leaves, self._mine, count)
        if not gradients:
            return parameters
        each = zip(itertools.chain(*self._of_arrays(gradients)), leaves, strict=True)
        whole = [jnp.zeros_like(leaf) if one is None else one for one, leaf in each]
        state = _spread(self._state, self._mine_of_state, self._plan.state_count)
        return [*_spread(whole, self._mine, count), *state, *parameters, *extra]

    def _take(self, outputs: Sequence[Any], values: Sequence[Value]) -> None:
        """Replace the state, and values, by the outputs of a method."""
        before_state = len(outputs) - self._plan.state_count
        state = outputs[before_state:]
        self._plan.tx.require_finite(state[len(self.names) :])
        self._state = [state[k] for k in self._mine_of_state]
        if before_state:
            found = iter([outputs[k] for k in self._mine])
            for rref, value in zip(self._rrefs.values(), values, strict=True):
                self._owned.replace(rref.id, value.layout.fill([next(found) for _ in value.leaves]))

    def _values(self) -> list[Value]:
        """Return the values, which others may have replaced. Raises ValueError if they do not fit the program."""
        each = zip(self._forms, self._rrefs.values(), strict=True)
        values = [form.take_apart(self._owned.value(rref.id).result()) for form, rref in each]
        shapes = iter([self._plan.shapes[k] for k in self._mine])
        for rref, one, tree in zip(self._rrefs.values(), values, self._trees, strict=True):
            if one.tree != tree or not all(fits(leaf, next(shapes)) for leaf in one.leaves):
                raise ValueError(f"{rref} has another structure, shape or dtype than when the optimizer was made")
        return values

    def _of_arrays(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients, without those of references in the values."""
        each = zip(gradients, self._own, strict=True)
        return [one if all(own) else list(itertools.compress(one, own)) for one, own in each]

    @shown_as("the fetch of an optimizer's state")
    def state(self) -> Saved:
        """Return the values and the state, consistent with each other."""
        with self._lock:
            values = {number: rref.local_value() for number, rref in self._rrefs.items()}
            return {"values": values, "state": dict(zip(self._names, self._state, strict=False))}

    @shown_as("the check of an optimizer's saved state")
    def prepare(self, saved: Saved) -> Saved:
        """Check that saved values and state fit the current ones; return them for ``put_back``."""
        known = self.state()
        differs = difference(saved, known)
        if differs is not None:
            raise ValueError(
                f"restore on {current_worker().info}: {differs}. Nothing was restored on any worker. Restore the "
                "state() of an optimizer of the same values and the same transformation."
            )
        return converted(saved, known)

    @shown_as("the return of an optimizer's saved state")
    def put_back(self, prepared: Saved) -> None:
        with self._lock:
            self._state[: len(self._names)] = prepared["state"].values()
            for number, value in prepared["values"].items():
                self._owned.replace(self._rrefs[number].id, value)

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the values in the current context. Raise if one is missing."""
        tape = current_tape(lambda: "an optimizer's step")
        found = [tape.gradient(rref.id) for rref in self._rrefs.values()]
        missing = [str(rref) for rref, gradient in zip(self._rrefs.values(), found, strict=True) if gradient is None]
        if missing:
            raise DifferentiationError(
                f"the optimizer has no gradient of {', '.join(missing)} in this context. Differentiate a function of "
                "it in the context first, or remove the reference from the optimizer. Compiled functions (jd.jit, "
                "jax.jit) compute only what they return or use: return the gradients too, or step inside the function.",
                missing=missing,
            )
        return [one for one in found if one is not None]


def state_names(plan: Plan) -> list[str]:
    """Return the names of the leaves of the transformation's state: their paths."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(plan.state.inner)]


# The functions that a step calls on owners, with ids: the optimizer keeps the references.


@shown_as("the start of an optimizer on an owner")
def init(identifier: int, extra: Any, number: int, given: Sequence[Any]) -> Any:
    return _known(identifier).carry_out((), Method("init", extra=extra), number, given)


@shown_as("an optimizer's step")
def step(identifier: int, extra: Any, number: int, given: Sequence[Any]) -> Any:
    owned = _known(identifier)
    sent = owned.carry_out(owned.gradients(), Method("update", extra=extra), number, given)
    return sent if sent.size else None  # None is cheaper to send than an empty array


@shown_as("a test that an optimizer's gradients are there")
def wait_for_gradients(identifier: int) -> None:
    """Raise if there is no gradient, or if its computation has failed."""
    jax.block_until_ready(_known(identifier).gradients())


def _known(identifier: int) -> OwnedParameters:
    found: OwnedParameters = current_worker().references.owned.value(identifier).result()
    return found


@dataclasses.dataclass(frozen=True)
class StepOnOwner(ServedFunction):
    """One round of a step with given gradients. ``size``: of what the owner sends, in bytes."""

    identifier: int
    method: Method
    number: int
    size: int
    label = "an optimizer's step"

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), np.uint8)

    def __call__(self, gradients: Sequence[Gradient], *given: Any) -> Any:
        return _known(self.identifier).carry_out(gradients, self.method, self.number, given)


def _spread(found: Sequence[Any], numbers: Sequence[int], count: int) -> list[Any]:
    """Return a list with the found at these numbers, and None elsewhere."""
    by_number = dict(zip(numbers, found, strict=True))
    return [by_number.get(k) for k in range(count)]
