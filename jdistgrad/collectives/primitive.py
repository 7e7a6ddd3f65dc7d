"""The collectives of processes and threads as a JAX primitive: its derivatives, its form under vmap, its lowering.

All operations but the maximum and the minimum are linear, so the rules below are all that JAX needs for derivatives of
any order, in both modes, and in loops. A rank that does not use a result performs the transpose too, with zeros, since
other ranks may use theirs; but JAX drops an operation without use where it differentiates a loop.

It has the ordered effect of the implementation, so XLA runs operations, and their transposes, in the program's order.
Routes, which rank sends its array to which, are parameters of the primitive.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

collective_p = Primitive("collective")


def _at_once(x: jax.Array, *, by: Any, name: str, how: Any) -> jax.Array:
    """Perform an operation. ``by``: it has ``rank``, ``size``, ``perform``, ``eager`` and ``traced``."""
    found: jax.Array = by.eager(name, x, how)
    return found


def _in_program(x: jax.Array, *, by: Any, name: str, how: Any) -> jax.Array:
    found: jax.Array = by.traced(name, x, how)
    return found


def _shape(x: Any, *, by: Any, name: str, how: Any) -> tuple[Any, Any]:
    closed = jax.make_jaxpr(functools.partial(_in_program, by=by, name=name, how=how))(x)
    return closed.out_avals[0], closed.effects


TRANSPOSES: dict[str, Callable[[Any, Any, jax.Array], jax.Array]] = {
    "sum": lambda by, _, g: by.perform("sum", g),
    "broadcast": lambda by, root, g: jnp.where(by.rank == root, by.perform("sum", g), jnp.zeros_like(g)),
    "allgather": lambda by, _, g: by.perform("sum", g)[by.rank],
    "alltoall": lambda by, _, g: by.perform("alltoall", g),
    "scatter": lambda by, _, g: by.perform("allgather", g).reshape(by.size * len(g), *g.shape[1:]),
    "shift": lambda by, route, g: by.perform("shift", g, route.reversed()),
    "permute": lambda by, route, g: by.perform("permute", g, route.reversed()),
}


def _transpose(g: Any, _: Any, *, by: Any, name: str, how: Any) -> list[jax.Array]:
    return [TRANSPOSES[name](by, how, ad.instantiate_zeros(g))]


def _batched(args: Any, axes: Any, *, by: Any, name: str, how: Any) -> tuple[jax.Array, int]:
    """Apply one operation to the whole batch.

    The batch's axis comes first, or second where rows are exchanged: JAX has it wherever this rank's own program left
    it, and the other ranks' programs may have left theirs elsewhere.
    """
    (x,), (axis,) = args, axes
    if name in ("alltoall", "scatter"):
        return by.perform(name, jnp.moveaxis(x, axis, 1), how), 1
    found = by.perform(name, jnp.moveaxis(x, axis, 0), how)
    if name == "send":  # what it returns has no axis
        found = jnp.broadcast_to(found, (x.shape[axis],))
    return found, 1 if name == "allgather" else 0


collective_p.def_impl(_at_once)
collective_p.def_effectful_abstract_eval(_shape)
ad.deflinear2(collective_p, _transpose)
ad.primitive_transposes[collective_p] = _transpose  # deflinear2's own omits it where the result is not used
batching.primitive_batchers[collective_p] = _batched
mlir.register_lowering(collective_p, mlir.lower_fun(_in_program, multiple_results=False))


@dataclass(frozen=True)
class Route:
    """Pairs of a sender and its receiver. A rank is the sender of one pair at most, and the receiver of one at most.

    Attributes:
      words: what the route is, as the ranks compare it; ``back``: the same of the way back.
    """

    pairs: tuple[tuple[int, int], ...]
    words: str
    back: str

    def __str__(self) -> str:
        return self.words

    def ends(self, rank: int) -> tuple[int | None, int | None]:
        """Return the rank that a rank sends to, and the rank that sends to it."""
        target = next((receiver for sender, receiver in self.pairs if sender == rank), None)
        return target, next((sender for sender, receiver in self.pairs if receiver == rank), None)

    def reversed(self) -> "Route":
        return Route(tuple((receiver, sender) for sender, receiver in self.pairs), self.back, self.words)


def shifted(size: int, by: Any, *, wrap: bool) -> Route:
    """Return the route on which every rank sends to the rank ``by`` places further on, in a ring or in a row."""
    by = operator.index(by) % size if wrap else operator.index(by)
    pairs = tuple((rank, (rank + by) % size if wrap else rank + by) for rank in range(size))
    if wrap:
        return Route(pairs, f"by {by}", f"by {-by % size}")
    return Route(tuple(one for one in pairs if 0 <= one[1] < size), f"by {by} in a row", f"by {-by} in a row")


def permuted(size: int, pairs: Iterable[Any]) -> Route:
    """Return the route of pairs of a sender and its receiver. Raises ValueError if they are none."""
    pairs = list(pairs)
    for pair in pairs:
        ends = tuple(pair) if isinstance(pair, Iterable) else (pair,)
        if len(ends) != 2 or not all(isinstance(end, int | np.integer) and 0 <= end < size for end in ends):
            raise ValueError(f"permute: pairs are (sender, receiver), ranks from 0 to {size - 1}, not {pair!r}")
    found = tuple((int(sender), int(receiver)) for sender, receiver in pairs)
    for ends, what in zip(zip(*found, strict=True), ("sends to", "gets from"), strict=False):
        twice = next((rank for rank in ends if ends.count(rank) > 1), None)
        if twice is not None:
            raise ValueError(
                f"permute: rank {twice} {what} several ranks in {list(found)}. Permute several times, or use alltoall."
            )
    return Route(found, f"along {list(found)}", f"back along {list(found)}")
