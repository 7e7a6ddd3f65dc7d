"""The owner's side of an optimizer: the parameters on one worker, and their optimizer state.

Pure functions compare saved values and states with the current ones, and convert them to the same kinds.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdistgrad.autograd.callee.functions import own_parts
from jdistgrad.autograd.tape.tape import current_tape
from jdistgrad.autograd.values.holes import Hole, Layout, has_gradient, is_float_array, split
from jdistgrad.errors import DifferentiationError
from jdistgrad.leaves import LeafSpec, plain
from jdistgrad.rpc import trees
from jdistgrad.rpc.functions import ServedFunction, shown_as
from jdistgrad.rpc.rref import RRef
from jdistgrad.rpc.worker import current_worker

ARRAYS = jax.Array, np.ndarray, np.generic
NUMBERS = {bool, int, float, complex}
LEAF = jax.tree.structure(0)

Gradient = Sequence[Any]  # of one value: an array for each of its float arrays, or None

Saved = dict[str, dict[int, Any]]  # an owner's part of a saved state: "values" and "states", by their indices there


class Value(NamedTuple):
    """A reference's value, flattened: its float arrays, their tree, and the layout of the rest."""

    leaves: list[Any]
    tree: Any
    layout: Layout

    @classmethod
    def of(cls, whole: Any) -> "Value":
        if isinstance(whole, jax.Array) and has_gradient(whole):
            return cls([whole], LEAF, Layout(Hole(), (0,)))
        layout, leaves = split(whole, is_float_array)
        floats = trees.map_leaves(lambda leaf: leaf if is_float_array(leaf) else None, whole)
        return cls(leaves, jax.tree.structure(floats), layout)


class ValueForm:
    """A cache of the structure of one reference's values, which makes ``Value.of`` about ten times as fast.

    It refers to no array that has a gradient, so that replaced values are freed.
    """

    def __init__(self) -> None:
        self._structure: Any = None
        self._kinds: list[Any] = []  # the dtypes of leaves that have a gradient, and all other leaves themselves
        self._tree: Any = None
        self._layout: Any = None

    def take_apart(self, whole: Any) -> Value:
        leaves, structure = jax.tree.flatten(whole)
        if self._structure is not None and structure == self._structure:
            each = list(zip(leaves, self._kinds, strict=True))
            if all(one is kind or (isinstance(one, jax.Array) and one.dtype is kind) for one, kind in each):
                return Value([one for one, kind in each if one is not kind], self._tree, self._layout)
        found = Value.of(whole)
        same = [id(leaf) for leaf in leaves if has_gradient(leaf)] == list(map(id, found.leaves))
        self._structure = structure if same else None  # JAX flattens values with references in another way
        self._kinds = [leaf.dtype if has_gradient(leaf) else leaf for leaf in leaves]
        self._tree, self._layout = found.tree, found.layout
        return found


@shown_as("the start of an optimizer on an owner")
class OwnedParameters:
    """The values of some references on their owner, and an optax transformation's state for these values."""

    def __init__(self, transformation: optax.GradientTransformation, rrefs: Sequence[RRef[Any]]):
        self._rrefs, self._owned = list(rrefs), current_worker().references.owned
        self._lock = current_worker().kept.setdefault("optimizers", threading.Lock())
        self.transformation = transformation
        self._forms = [ValueForm() for _ in rrefs]
        values = [Value.of(rref.local_value()) for rref in rrefs]
        self._own = [own_parts(rref.local_value()) for rref in rrefs]
        try:
            self._state = transformation.init([jax.tree.unflatten(one.tree, one.leaves) for one in values])
        except Exception as error:
            error.add_note(
                f"{current_worker().info}: the transformation gets a list of the {len(values)} values that are "
                "optimized here. Pass masks or labels as such a list too, or as a function of the list."
            )
            raise

        def update(trees: Any, gradients: Any, state: Any, parameters: Any, scale: Any, extra: Any) -> tuple[Any, Any]:
            gradients, parameters = (list(map(jax.tree.unflatten, trees, one)) for one in (gradients, parameters))
            scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients)
            updates, state = transformation.update(scaled, state, parameters, **extra)
            return [jax.tree.leaves(one) for one in optax.apply_updates(parameters, updates)], state

        self._update = jax.jit(update, static_argnums=0)

    def inspect(self, gradients: Sequence[Gradient]) -> Any:
        """Return two numbers: the gradients' squared norm, and 1 if all are finite, else 0."""
        found = _inspected([leaf for one in self._of_arrays(gradients) for leaf in one if leaf is not None])
        return np.array(found, jax.dtypes.canonicalize_dtype(np.float64))

    def wait_for(self, gradients: Sequence[Gradient]) -> None:
        """Raise if the computation of a gradient has failed."""
        jax.block_until_ready(gradients)

    def step(self, gradients: Sequence[Gradient], scale: Any, extra: dict[str, Any]) -> None:
        """Update the values with gradients. ``extra``: extra arguments of the transformation, such as the loss."""
        factor = np.asarray(scale, jax.dtypes.canonicalize_dtype(np.float64))
        with self._lock:
            # Others may have replaced the values, or changed their contents.
            each = zip(self._forms, self._rrefs, strict=True)
            values = [form.take_apart(self._owned.value(rref.id).result()) for form, rref in each]
            parameters, trees = [one.leaves for one in values], tuple(one.tree for one in values)
            whole = [
                [jnp.zeros_like(leaf) if one is None else one for one, leaf in zip(mine, leaves, strict=True)]
                for mine, leaves in zip(self._of_arrays(gradients), parameters, strict=True)
            ]
            found, self._state = self._update(trees, whole, self._state, parameters, factor, extra)
            for rref, value, leaves in zip(self._rrefs, values, found, strict=True):
                self._owned.replace(rref.id, value.layout.fill(leaves))

    def _of_arrays(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients, without those of references in the values."""
        each = zip(gradients, self._own, strict=True)
        return [one if all(own) else list(itertools.compress(one, own)) for one, own in each]

    @shown_as("the fetch of an optimizer's state")
    def state(self) -> tuple[list[Any], Any]:
        """Return the values and the transformation's state, consistent with each other."""
        with self._lock:
            return [rref.local_value() for rref in self._rrefs], self._state

    @shown_as("the check of an optimizer's saved state")
    def prepare(self, saved: Saved) -> Saved:
        """Check that saved values and state fit the current ones; return them for ``put_back``."""
        values, state = self.state()
        named = dict(zip(saved["values"], values, strict=True))
        known = {"values": named, "states": dict.fromkeys(saved["states"], state)}
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
            (self._state,) = prepared["states"].values()
            for rref, value in zip(self._rrefs, prepared["values"].values(), strict=True):
                self._owned.replace(rref.id, value)

    def gradients(self) -> list[Gradient]:
        """Return the gradients of the values in the current context. Raise if one is missing."""
        tape = current_tape(lambda: "an optimizer's step")
        found = [tape.gradient(rref.id) for rref in self._rrefs]
        missing = [str(rref) for rref, gradient in zip(self._rrefs, found, strict=True) if gradient is None]
        if missing:
            raise DifferentiationError(
                f"the optimizer has no gradient of {', '.join(missing)} in this context. Differentiate a function of "
                "it in the context first, or remove the reference from the optimizer. Compiled functions (jd.jit, "
                "jax.jit) compute only what they return or use: return the gradients too, or step inside the function.",
                missing=missing,
            )
        return [one for one in found if one is not None]


@jax.jit
def _inspected(leaves: list[Any]) -> tuple[Any, Any]:
    wide = [leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf for leaf in leaves]
    squares = [jnp.sum(jnp.abs(leaf) ** 2) for leaf in wide]
    return sum(squares), jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


# The functions that a step calls on owners, with ids: the optimizer keeps the references.


@shown_as("an optimizer's step")
def with_gradients(identifier: int, method: str, *args: Any) -> Any:
    owned = _known(identifier)
    return getattr(owned, method)(owned.gradients(), *args)


def _known(identifier: int) -> OwnedParameters:
    found: OwnedParameters = current_worker().references.owned.value(identifier).result()
    return found


@dataclasses.dataclass(frozen=True)
class Inspect(ServedFunction):
    """An inspection of given gradients: see ``OwnedParameters.inspect``."""

    identifier: int
    label = "an inspection of gradients"
    changes = False

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2,), jax.dtypes.canonicalize_dtype(np.float64))

    def __call__(self, gradients: Sequence[Gradient]) -> Any:
        return _known(self.identifier).inspect(gradients)


@dataclasses.dataclass(frozen=True)
class OwnersStep(ServedFunction):
    """A step with given gradients. Raises an error if an owner's inspection found one that is not finite.

    ``owners``: the inspecting owners. ``extra``: the names of the transformation's extra arguments.
    """

    identifier: int
    owners: tuple[str, ...]
    extra: tuple[str, ...]
    label = "an optimizer's step"
    result = jax.ShapeDtypeStruct((), np.bool_)
    changes = True

    def __call__(self, gradients: Sequence[Gradient], *others: Any) -> Any:
        count = len(self.extra)
        scale, finite = others[count:] or (1.0, ())
        if self.owners:
            require_finite(self.owners, finite)
        _known(self.identifier).step(gradients, scale, dict(zip(self.extra, others, strict=False)))
        return np.ones(self.result.shape, self.result.dtype)


def require_finite(owners: Sequence[str], finite: Sequence[Any]) -> None:
    bad = [owner for owner, one in zip(owners, finite, strict=True) if not one]
    if bad:
        raise DifferentiationError(f"a gradient on {', '.join(bad)} is not finite: no step was made", workers=bad)


def difference(found: Any, known: Any) -> str | None:
    """Return the first difference in structure, shapes or dtypes, in words; None if there is none."""

    keystr, with_path = jax.tree_util.keystr, jax.tree_util.tree_leaves_with_path
    theirs, ours = ({keystr(path): leaf for path, leaf in with_path(tree)} for tree in (found, known))
    shown: list[Any] = [jax.tree.structure(tree) for tree in (found, known)]
    other = f"the structure is {shown[0]}, expected {shown[1]}" if shown[0] != shown[1] else None
    return first_difference(theirs, ours, _fits, _kind) or other


def first_difference(
    theirs: Mapping[str, Any],
    ours: Mapping[str, Any],
    fits: Callable[[Any, Any], bool],
    spelled: Callable[[Any], str],
) -> str | None:
    """Return the first difference between leaves, by path, in words; None if theirs fit."""
    for place, expected in ours.items():
        if place not in theirs:
            return f"{place} is missing, expected {spelled(expected)}"
        if not fits(theirs[place], expected):
            return f"{place} is {spelled(theirs[place])}, expected {spelled(expected)}"
    extra = next((place for place in theirs if place not in ours), None)
    return None if extra is None else f"{extra} is not expected; it is {spelled(theirs[extra])}"


def converted(found: Any, known: Any) -> Any:
    """Convert fitting values to the kinds of the known values, with the order of the known dicts, and copy arrays."""
    leaves = trees.leaves(found)
    return trees.map_leaves(lambda leaf: _at_home(next(leaves), leaf), known)


def _fits(found: Any, expected: Any) -> bool:
    """Return whether a leaf fits. Files return Python numbers as arrays without dimensions."""
    if type(expected) in NUMBERS and isinstance(found, ARRAYS):
        plain = isinstance(found.dtype, np.dtype) and found.ndim == 0
        return plain and np.can_cast(found.dtype, type(expected), "same_kind")
    return _kind(found) == _kind(expected)


def _kind(leaf: Any) -> str:
    return str(LeafSpec.of(leaf)) if isinstance(leaf, ARRAYS) else f"a {type(leaf).__name__}"


def _at_home(found: Any, known: Any) -> Any:
    if isinstance(known, jax.Array):  # a copy: one restored from a file may be committed to another worker's device
        spec = LeafSpec.of(found if isinstance(found, jax.Array) else known)  # NumPy knows of no weak types
        return spec.restored(np.array(plain(found)))
    if isinstance(known, np.ndarray):
        return np.array(found)
    return type(known)(found.item()) if type(known) in NUMBERS and isinstance(found, ARRAYS) else found
