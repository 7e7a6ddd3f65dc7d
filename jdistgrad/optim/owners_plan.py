"""How an optax transformation of a tree of values divides among their owners, which all divide it alike."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdistgrad.optim.division import HERE, Division, MixedError, inlined
from jdistgrad.optim.sharding import on_parameters


class Piece(NamedTuple):
    """Leaves of a tree that are together at one place: those of a reference's value, or one leaf here."""

    place: int
    structure: Any


class Method(NamedTuple):
    """A method of the transformation, and what else decides its program.

    ``extra``: the names and shapes of extra arguments of ``update``.
    """

    name: str
    with_params: bool = True
    extra: tuple[tuple[str, Any], ...] = ()


@jax.tree_util.register_static
class Plan:
    """A transformation of a tree, divided.

    Arguments:
      tx: the transformation.
      params: the tree of parameters, with shapes in place of arrays, and trees of shapes in place of references.
      pieces: its pieces, in order.
    """

    def __init__(self, tx: optax.GradientTransformationExtraArgs, params: Any, pieces: Sequence[Piece]):
        self.tx, self.params, self.pieces = tx, params, pieces
        self.shapes: list[Any] = jax.tree.leaves(params)
        self._divisions: dict[Method, Division] = {}
        self._state = jax.eval_shape(tx.init, params)
        placed = _placed(tx, self._state, jax.tree.unflatten(jax.tree.structure(params), _by_leaf(pieces)))
        parts, self.state_outer = jax.tree.flatten(placed, is_leaf=_is_of_one_owner)
        self.state_pieces = [Piece(jax.tree.leaves(part)[0], jax.tree.structure(part)) for part in parts]

    def __reduce__(self) -> Any:
        return Plan, (self.tx, self.params, self.pieces)

    def results(self, method: Method) -> list[Piece]:
        """Return the pieces of a method's results: of the updates, and of the state."""
        return [*(self.pieces if method.name == "update" else ()), *self.state_pieces]

    def division(self, method: Method) -> Division:
        """Return a method's program, divided. Raises ValueError if it takes arrays of several owners together."""
        if method not in self._divisions:
            closed, places = self._program(method)
            try:
                self._divisions[method] = Division(closed, places, _by_leaf(self.results(method)))
            except MixedError as error:
                raise ValueError(
                    f"on_owners: in the transformation's {method.name}, {error}. Norms, clipping and elementwise "
                    "transformations can be divided. Apply this one to values of one owner, or to jd.get(params)."
                ) from error
        return self._divisions[method]

    def _program(self, method: Method) -> tuple[Any, list[int]]:
        """Return a method's program, and the place of each of its inputs."""
        params, tx = _by_leaf(self.pieces), self.tx
        if method.name == "init":
            return inlined(lambda p: jax.tree.leaves(tx.init(p)), self.params), params
        closed = inlined(
            lambda g, s, p, extra: jax.tree.leaves(tx.update(g, s, p, **extra)),
            *(self.params, self._state, self.params if method.with_params else None, dict(method.extra)),
        )
        places = [*params, *_by_leaf(self.state_pieces), *(params if method.with_params else ())]
        return closed, places + [HERE] * len(method.extra)


def _by_leaf(pieces: Sequence[Piece]) -> list[int]:
    return [piece.place for piece in pieces for _ in range(piece.structure.num_leaves)]


def _placed(tx: optax.GradientTransformationExtraArgs, state: Any, places: Any) -> Any:
    """Return a state with the places of its leaves: what belongs to a parameter is where that is."""
    with contextlib.suppress(Exception):  # of ``init``, which gets a tree without arrays: optax.flatten wants one
        state = on_parameters(tx, lambda part, place: jax.tree.map(lambda _: place, part), state, places)
    return jax.tree.map(lambda place: place if isinstance(place, int) else HERE, state)


def _is_of_one_owner(places: Any) -> bool:
    """Return whether a part of a state becomes one reference. Tuples stay: most are optax's own."""
    found = set(jax.tree.leaves(places))
    return not isinstance(places, tuple) and len(found) == 1 and HERE not in found
