"""The table of operations, and their JAX primitive: derivatives, batching, lowering.

All operations but the maximum and the minimum are linear, so a row's transpose is all that JAX needs for derivatives of
any order, in both modes, and in loops. A rank that does not use a result performs the transpose too, with zeros, since
other ranks may use theirs; but JAX drops unused operations where it differentiates a loop.

An operation has the ordered effect of the group, so XLA runs operations, and their transposes, in the program's order.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Shape = tuple[int, ...]

CHUNK = 1 << 29  # bytes: MPI counts are C ints, and a gather multiplies them by the number of ranks

# How arrays of several ranks are combined.

COMBINE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def widened(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind not in "iub" else dtype


def combined(parts: Sequence[np.ndarray] | np.ndarray, op: str) -> np.ndarray:
    """Combine in the order of the ranks, so that all ranks get the same bits; small floats are combined in 32 bits."""
    wide = widened(parts[0].dtype)
    result = parts[0].astype(wide)
    for part in parts[1:]:
        COMBINE[op](result, part.astype(wide, copy=False), out=result)
    return result


def keeping_nans(reduce: Callable[[jax.Array, str], jax.Array], x: jax.Array, op: str) -> jax.Array:
    """Reduce, where the maximum of NaN depends on the rank that holds it, as in MPI and gloo."""
    reduced = reduce(x, op)
    if op == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return reduced
    return jnp.where(reduce(jnp.isnan(x).astype(jnp.int32), "sum") > 0, jnp.nan, reduced)


# The table.


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Arguments:
      result: from the arrays of all ranks, the own rank and ``how`` to the own result. An engine without an algorithm
        for the operation gathers all arrays, and applies this.
      transpose: from the group, the cotangent of the result and ``how`` to the own cotangent.
      shape: from the argument's shape and the number of ranks to the result's.
      batch: the place of a batch's axis, in the argument and in the result: second where rows are exchanged, or arrays
        stacked.
      overwrites: whether the result is written over the argument, in host memory.
    """

    result: Callable[[Any, Any, Any], Any]
    transpose: Callable[[Any, jax.Array, Any], jax.Array]
    shape: Callable[[Shape, int], Shape] = lambda shape, size: shape
    batch: tuple[int, int] = (0, 0)
    overwrites: bool = False


def _moved(parts: Sequence[Any], rank: int, route: "Route") -> Any:
    _, source = route.ends(rank)
    return np.zeros_like(parts[rank]) if source is None else np.array(parts[source])


def _prefix_sum(parts: Any, rank: Any, step: int, *, inclusive: bool) -> Any:
    """Return the sum over the ranks up to this one, in their order, of NumPy or JAX arrays."""
    xp, (first, *rest) = np if isinstance(parts[0], np.ndarray | np.generic) else jnp, range(len(parts))[::step]
    total = parts[first].astype(widened(parts[0].dtype))
    for place in rest:
        counts = (step * place < step * rank) | (inclusive & (place == rank))
        total = xp.where(counts, total + parts[place].astype(total.dtype), total)
    return total if inclusive else xp.where(rank == first, xp.zeros_like(total), total)


OPERATIONS: dict[str, Row] = {
    # how: "sum", which has this transpose, "max" or "min"
    "allreduce": Row(
        lambda parts, rank, op: combined(parts, op),
        lambda by, g, op: by.perform("allreduce", g, "sum"),
        overwrites=True,
    ),
    # how: the root
    "broadcast": Row(
        lambda parts, rank, root: np.array(parts[root]),
        lambda by, g, root: jnp.where(by.rank == root, by.perform("allreduce", g, "sum"), jnp.zeros_like(g)),
        overwrites=True,
    ),
    "allgather": Row(
        lambda parts, rank, how: np.stack(parts),
        lambda by, g, how: by.perform("allreduce", g, "sum")[by.rank],
        lambda shape, size: (size, *shape),
        batch=(0, 1),
    ),
    # of blocks of rows, one for each rank, along the first axis
    "alltoall": Row(
        lambda parts, rank, how: np.stack([part[rank] for part in parts]),
        lambda by, g, how: by.perform("alltoall", g),
        batch=(1, 1),
    ),
    "reduce_scatter": Row(
        lambda parts, rank, how: combined([np.split(part, len(parts))[rank] for part in parts], "sum"),
        lambda by, g, how: by.perform("allgather", g).reshape(by.size * len(g), *g.shape[1:]),
        lambda shape, size: (shape[0] // size, *shape[1:]),
        batch=(1, 1),
    ),
    # how: 1, or -1 to add from the last rank on
    "scan": Row(
        lambda parts, rank, step: _prefix_sum(parts, rank, step, inclusive=True),
        lambda by, g, step: by.perform("scan", g, -step),
    ),
    "exscan": Row(
        lambda parts, rank, step: _prefix_sum(parts, rank, step, inclusive=False),
        lambda by, g, step: by.perform("exscan", g, -step),
    ),
    # how: a ``Route``
    "shift": Row(_moved, lambda by, g, route: by.perform("shift", g, route.reversed())),
    "permute": Row(_moved, lambda by, g, route: by.perform("permute", g, route.reversed())),
}


def described(name: str, x: Any, how: Any) -> str:
    """Describe an operation in the words that the ranks compare."""
    root = "root " if name == "broadcast" else ""
    return f"{name} of {x.dtype}{list(x.shape)}" + ("" if how is None else f" ({root}{how})")


# The primitive. Besides the rows of the table it has "send" and "recv", in which only two ranks take part. ``by`` is
# the group, with ``rank``, ``size``, ``perform``, ``eager`` and ``traced``.

collective_p = Primitive("collective")


def _in_program(x: jax.Array, *, by: Any, name: str, how: Any) -> jax.Array:
    found: jax.Array = by.traced(name, x, how)
    return found


def _shape(x: Any, *, by: Any, name: str, how: Any) -> tuple[Any, Any]:
    closed = jax.make_jaxpr(functools.partial(_in_program, by=by, name=name, how=how))(x)
    return closed.out_avals[0], closed.effects


def _transpose(g: Any, _: Any, *, by: Any, name: str, how: Any) -> list[jax.Array]:
    return [OPERATIONS[name].transpose(by, ad.instantiate_zeros(g), how)]


def _batched(args: Any, axes: Any, *, by: Any, name: str, how: Any) -> tuple[jax.Array, int]:
    """Apply one operation to the whole batch.

    The batch's axis moves to the place that the row names: in the other ranks' programs it may be another one.
    """
    (x,), (axis,) = args, axes
    before, after = OPERATIONS[name].batch if name in OPERATIONS else (0, 0)
    found = by.perform(name, jnp.moveaxis(x, axis, before), how)
    if name == "send":  # which returns a scalar
        found = jnp.broadcast_to(found, (x.shape[axis],))
    return found, after


collective_p.def_impl(lambda x, by, name, how: by.eager(name, x, how))
collective_p.def_effectful_abstract_eval(_shape)
ad.deflinear2(collective_p, _transpose)
ad.primitive_transposes[collective_p] = _transpose  # deflinear2's rule skips unused results
batching.primitive_batchers[collective_p] = _batched
mlir.register_lowering(collective_p, mlir.lower_fun(_in_program, multiple_results=False))


# Routes: which rank sends to which, as parameters of operations.


@dataclass(frozen=True)
class Route:
    """Pairs of a sender and its receiver; a rank occurs in each role once at most.

    ``words``: the route as text, which the ranks compare; ``back``: the text of the reverse.
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
    """Return the route of pairs of a sender and its receiver. Raises ValueError for invalid pairs."""
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


# The division by a number of ranks. XLA turns a division by a constant into a multiplication by its rounded reciprocal
# (AlgebraicSimplifier). To get NumPy's bits, compiled code divides by a number that depends on the array. The primitive
# keeps the division linear for JAX.

divide_p = Primitive("divide_as_numpy")


def divided(x: Any, by: float) -> jax.Array:
    """Return ``x / by``, as NumPy divides."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array / by
    found: jax.Array = divide_p.bind(array, by=by)
    return found


def _division(x: jax.Array, *, by: float) -> jax.Array:
    divisor = jnp.asarray(by, x.dtype)
    if jnp.iscomplexobj(x):  # NumPy multiplies too
        return x / divisor
    return x / jnp.where(jnp.isnan(x), 1, divisor)


divide_p.def_impl(jax.jit(_division, static_argnames="by"))
divide_p.def_abstract_eval(lambda x, by: x)
ad.deflinear2(divide_p, lambda g, _, by: [divide_p.bind(g, by=by)])
batching.defvectorized(divide_p)
mlir.register_lowering(divide_p, mlir.lower_fun(_division, multiple_results=False))
