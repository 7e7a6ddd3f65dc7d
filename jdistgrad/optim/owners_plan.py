"""How an optax transformation of a tree of values divides among their owners, which all divide it alike."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jdistgrad.optim.division import HERE, Division, MixedError, inlined
from jdistgrad.optim.optax_extras import on_parameters


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
      tx: the transformation, or an object with its methods.
      params: the tree of parameters, with shapes in place of arrays, and trees of shapes in place of references.
      pieces: its pieces, in order.
      is_shared: whether each owner has a copy of what belongs to no value, such as a count of steps.
    """

    def __init__(self, tx: Any, params: Any, pieces: Sequence[Piece], *, is_shared: bool = False):
        self.tx, self.params, self.pieces, self.is_shared = tx, params, pieces, is_shared
        self.shapes: list[Any] = jax.tree.leaves(params)
        self._divisions: dict[Method, Division] = {}
        self.state = jax.eval_shape(tx.init, params)
        self.owners = {piece.place for piece in pieces} - {HERE}
        otherwise = min(self.owners) if is_shared and len(self.owners) == 1 else HERE
        placed = _placed(tx, self.state, jax.tree.unflatten(jax.tree.structure(params), by_leaf(pieces)), otherwise)
        parts, self.state_outer = jax.tree.flatten(placed, is_leaf=_is_of_one_owner)
        self.state_count = len(jax.tree.leaves(self.state))
        self.state_pieces = [Piece(jax.tree.leaves(part)[0], jax.tree.structure(part)) for part in parts]

    def __reduce__(self) -> Any:
        return functools.partial(Plan, is_shared=self.is_shared), (self.tx, self.params, self.pieces)

    def results(self, method: Method) -> list[Piece]:
        """Return the pieces of a method's results: of the updates, and of the state."""
        return [*(self.pieces if method.name == "update" else ()), *self.state_pieces]

    def division(self, method: Method) -> Division:
        """Return a method's program, divided. Raises ValueError if it takes arrays of several owners together."""
        if method not in self._divisions:
            closed, places = self._program(method)
            try:
                wanted = by_leaf(self.results(method))
                self._divisions[method] = Division(closed, places, wanted, self.owners if self.is_shared else ())
            except MixedError as error:
                raise ValueError(
                    f"in the transformation's {method.name}, {error}. Norms, clipping and elementwise "
                    "transformations can be divided. Apply this one to values of one owner, or to jd.get(params)."
                ) from error
        return self._divisions[method]

    def _program(self, method: Method) -> tuple[Any, list[int]]:
        """Return a method's program, and the place of each of its inputs."""
        params, state, tx = by_leaf(self.pieces), by_leaf(self.state_pieces), self.tx
        whole = (lambda closed: closed) if len({*params, *state}) == 1 else inlined
        if method.name == "init":
            return whole(jax.make_jaxpr(lambda p: jax.tree.leaves(tx.init(p)))(self.params)), params
        trace = jax.make_jaxpr(lambda g, s, p, extra: tx.update(g, s, p, **extra), return_shape=True)
        others, found = (self.params if method.with_params else None, dict(method.extra)), self.state
        last: Any = None
        while jax.tree.leaves(found) != last:  # an update may widen the state: moments of bfloat16 become float32
            last = jax.tree.leaves(found)
            closed, (_, found) = trace(self.params, found, *others)
        places = [*params, *state, *(params if method.with_params else ())]
        return whole(closed), places + [HERE] * len(method.extra)


def by_leaf(pieces: Sequence[Piece]) -> list[int]:
    return [piece.place for piece in pieces for _ in range(piece.structure.num_leaves)]


def _placed(tx: Any, state: Any, places: Any, otherwise: int) -> Any:
    """Return a state with the places of its leaves: that of their parameter, or ``otherwise``."""
    with contextlib.suppress(Exception):  # of ``init``, which gets a tree without arrays: optax.flatten wants one
        state = on_parameters(tx, lambda part, place: jax.tree.map(lambda _: place, part), state, places)
    return jax.tree.map(lambda place: place if isinstance(place, int) else otherwise, state)


def _is_of_one_owner(places: Any) -> bool:
    """Return whether a part of a state becomes one reference. Tuples stay: most are optax's own."""
    found = set(jax.tree.leaves(places))
    return not isinstance(places, tuple) and len(found) == 1 and HERE not in found
