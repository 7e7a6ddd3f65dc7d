"""The interface of the collectives, and their derivatives, the same for all implementations.

A collective is differentiated as part of the *sum of all ranks' results*. So the transpose of an allreduce is an
allreduce of the cotangents; of a broadcast, their sum on the root; of an allgather, on each rank the sum of all ranks'
cotangents of that rank's row. With ``J`` the operation on the inputs of all ranks together, ``<y, J x> = <J' y, x>``
summed over ranks. A loss that every rank computes alike is counted ``size`` times: differentiate ``loss / size``.
Forward mode pushes the tangents of all ranks at once; a maximum or minimum has reverse mode only.
"""

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives import send_recv
from jdistgrad.collectives.descriptions import is_elsewhere, refuse_sparse
from jdistgrad.collectives.host_arrays import to_jax
from jdistgrad.collectives.operations import divided, permuted, shifted
from jdistgrad.errors import CollectiveError

Reduction = Literal["sum", "max", "min", "mean", "prod"]


class Collectives(abc.ABC):
    """Operations that every rank of a group must call, in the same order, with the same shapes and dtypes.

    The operations take trees of arrays, concrete or traced (in ``jit``, ``grad``, ``vmap``). Rows are along the first
    axis of each array.
    """

    rank: Any
    size: int
    world_ranks: tuple[int, ...] | None = None  # of the group's workers, in its order; None on a mesh
    has_room: bool = True  # whether overlap pays

    def allreduce(self, tree: Any, op: Reduction = "sum") -> Any:
        """Return the sum, mean, product, maximum or minimum over all ranks: the same result on all of them.

        The transpose of a sum is the sum of all ranks' cotangents; of a maximum, that sum on the ranks that hold the
        maximum, in equal shares. A product gathers the arrays of all ranks.
        """
        refuse_sparse(tree, "allreduce")

        def reduced(leaf: Any) -> jax.Array:
            x = _checked("allreduce", leaf, op)
            if op == "prod":
                return jnp.prod(self.gather_same(x), axis=0, dtype=x.dtype)
            if op == "mean":
                wide = x.dtype  # sums of integers and of small floats may not fit their dtype
                if jnp.issubdtype(wide, jnp.integer):
                    wide = jax.dtypes.canonicalize_dtype(float)
                elif jnp.finfo(wide).maxexp < jnp.finfo(jnp.float32).maxexp:
                    wide = jnp.dtype(jnp.float32)
                mean = divided(self.perform("allreduce", x.astype(wide), "sum"), self.size)
                return mean.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else mean
            return self.perform("allreduce", x, op) if op == "sum" else _extreme(self, op, self.localize(x))

        return _each(reduced, tree)

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        """Return the root's tree. Transpose: the sum of the cotangents on the root, 0 elsewhere."""
        root = self._checked_root(root)
        return _each(lambda x: self.perform("broadcast", to_jax(x), root), tree)

    def allgather(self, tree: Any) -> Any:
        """Return the arrays of all ranks, stacked by rank. Transpose: this rank's row of the sum of all cotangents."""
        refuse_sparse(tree, "allgather")
        return _each(lambda x: self.perform("allgather", to_jax(x)), tree)

    def gather_rows(self, tree: Any, counts: Sequence[int] | None = None) -> Any:
        """Return the rows of all ranks, one after another. The ranks may have different numbers of rows.

        Arguments:
          counts: the number of rows of each rank, which compiled programs must know beforehand. Otherwise the ranks
            exchange these numbers.
        """
        refuse_sparse(tree, "gather_rows")
        arrays = _each(to_jax, tree)
        shapes = [array.shape for array in jax.tree.leaves(arrays)]
        if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"gather_rows: the arrays of a tree must have equally many rows, not shapes {shapes}")
        mine = shapes[0][0] if shapes else 0
        known = list(map(int, self._of_all(mine, "gather_rows(x, counts=[...])") if counts is None else counts))
        own = known[self.rank] if isinstance(self.rank, int) and len(known) == self.size else mine
        if len(known) != self.size or own != mine or max(known) < mine:
            raise ValueError(f"gather_rows: counts={known} for {self.size} ranks, of which this has {mine} rows")

        def gathered(x: jax.Array) -> jax.Array:
            rows = self.perform("allgather", _padded(x, max(known)))
            return jnp.concatenate([rows[rank, :count] for rank, count in enumerate(known)])

        return jax.tree.map(gathered, arrays)

    def alltoall(self, tree: Any, splits: Sequence[int] | Sequence[Sequence[int]] | None = None) -> Any:
        """Send a block of rows to each rank; return the blocks from all ranks, in their order.

        Transpose: the blocks of cotangents go back.

        Arguments:
          splits: the number of rows for each rank; by default equally many. Compiled programs must know these numbers
            for all ranks: ``splits[sender][receiver]``.
        """
        refuse_sparse(tree, "alltoall")
        if splits is not None:
            return self._exchanged(tree, splits)

        def exchanged(leaf: Any) -> jax.Array:
            x = self._divisible(to_jax(leaf), "alltoall")
            blocks = x.reshape(self.size, len(x) // self.size, *x.shape[1:])
            return self.perform("alltoall", blocks).reshape(x.shape)

        return _each(exchanged, tree)

    def _exchanged(self, tree: Any, splits: Any) -> Any:
        if not isinstance(self.rank, int):
            raise CollectiveError(
                "alltoall: the ranks of a mesh run one program, so blocks have one size. Omit splits."
            )
        if np.shape(splits) not in ((self.size,), (self.size, self.size)):
            raise ValueError(
                f"alltoall: expected splits with a number of rows for each of {self.size} ranks, or "
                f"splits[sender][receiver], not {splits}"
            )
        table = np.asarray(splits).astype(int).tolist()
        if np.ndim(splits) == 1:
            table = self._of_all(table, f"alltoall(x, splits[sender][receiver]), not {splits}")
        mine, most = table[self.rank], max(map(max, table))
        ends = np.cumsum(mine)[:-1].tolist()

        def exchanged(leaf: Any) -> jax.Array:
            x = to_jax(leaf)
            if sum(mine) != len(x):
                raise ValueError(f"alltoall: splits of {list(mine)} rows for an array of {len(x)} rows")
            blocks = self.perform("alltoall", jnp.stack([_padded(block, most) for block in jnp.split(x, ends)]))
            return jnp.concatenate([blocks[sender, : row[self.rank]] for sender, row in enumerate(table)])

        return _each(exchanged, tree)

    def reduce_scatter(self, tree: Any) -> Any:
        """Return this rank's block of rows of the sum over all ranks. Transpose: the cotangents of all, gathered."""
        refuse_sparse(tree, "reduce_scatter")

        what = "reduce_scatter"
        return _each(lambda x: self.perform(what, self._divisible(_checked(what, x), what)), tree)

    def scan(self, tree: Any) -> Any:
        """Return the sum over the ranks up to this one, itself included. Transpose: the same from the last rank on."""
        refuse_sparse(tree, "scan")
        return _each(lambda x: self.perform("scan", _checked("scan", x), 1), tree)

    def exscan(self, tree: Any) -> Any:
        """Return the sum over the ranks before this one; of numbers of rows, the offset of this rank's rows.

        Transpose: the sum over the ranks after this one.
        """
        refuse_sparse(tree, "exscan")
        return _each(lambda x: self.perform("exscan", _checked("exscan", x), 1), tree)

    def shift(self, tree: Any, by: int = 1, *, wrap: bool = True, edge: Any = None) -> Any:
        """Send to the rank ``by`` places further on; return what came from the rank ``by`` places before.

        The ranks are a ring; without ``wrap`` a row, at whose beginning (for a negative ``by``, whose end) ranks get
        zeros, or ``edge``. Transpose: the way back.

        Arguments:
          edge: the result of ranks to which no other sends: a tree like ``tree``, or one number for all leaves. Arrays
            of integers take no float.

        Example:
          >>> left = everybody.shift(u[-1], wrap=False, edge=0.0)  # the last of the left neighbour's points
          >>> right = everybody.shift(u[0], by=-1, wrap=False, edge=0.0)
        """
        if wrap and edge is not None:
            raise ValueError("shift: a ring has no edge. Use shift(..., wrap=False, edge=...), or leave edge out.")
        route = shifted(self.size, by, wrap=wrap)
        edges = jax.tree.map(lambda _: edge, tree) if jnp.isscalar(edge) else edge
        filling = None if edge is None else jax.tree.map(_edge_of, tree, edges)
        found = _each(lambda x: self.perform("shift", to_jax(x), route), tree)
        if edge is None:
            return found
        arrived = jnp.isin(self.rank, np.array([receiver for _, receiver in route.pairs], int))
        return jax.tree.map(functools.partial(jnp.where, arrived), found, filling)

    def permute(self, tree: Any, pairs: Iterable[tuple[int, int]]) -> Any:
        """Send from some ranks to others, as ``jax.lax.ppermute``; ranks to which no rank sends get zeros.

        Transpose: the way back. All ranks must call it with the same pairs. ``send`` and ``recv`` are for programs that
        differ from rank to rank.

        Arguments:
          pairs: ``(sender, receiver)``; each rank is at most one pair's sender, and at most one's receiver.

        Example:
          >>> everybody.permute(x, [(0, 2)])  # rank 0's x on rank 2
        """
        route = permuted(self.size, pairs)
        return _each(lambda x: self.perform("permute", to_jax(x), route), tree)

    def send(self, tree: Any, to: int, *, after: Any = None, tag: int = 0) -> jax.Array:
        """Send arrays to a rank, which calls ``recv``; return 0.0, which depends on the arrays.

        Only these two ranks take part, and the sender does not wait. The derivative of a loss that contains the result
        of ``send`` waits for the cotangents, which the derivative of the other rank's loss sends. Reverse mode of any
        order; ``vmap`` must be used on both ranks; ``jax.checkpoint`` is not supported.

        Arguments:
          after: in a loop (``lax.scan``), a value that changes from step to step, if the arrays do not depend on one.
          tag: distinguishes messages between the same ranks, if they are received in another order.

        Example:
          >>> loss = lambda params: ranks.send(jnp.tanh(x @ params), to=1)  # rank 0: its part of the loss is 0
        """
        return send_recv.send(self, tree, to, after, tag)

    def recv(self, like: Any, source: int, *, after: Any, tag: int = 0) -> Any:
        """Return the arrays that a rank sends to this one by ``send``.

        Arguments:
          like: arrays, or ``jax.ShapeDtypeStruct``, of the shapes and dtypes that are sent; under ``vmap``, arrays.
          after: the values that this rank differentiates, for example its parameters: cotangents are sent back only if
            the result depends on them, and the loss on the result. In a loop (``lax.scan``) also a value that changes
            from step to step, for example the carry: JAX hoists other values out of a differentiated loop, and the
            array would be received once. None: neither rank differentiates the message.
          tag: the sender's.

        Raises:
          MissingRanksError: nothing has arrived within the collectives' ``timeout``.
          DisagreementError: other shapes or dtypes were sent.

        Example:
          >>> hidden = jax.ShapeDtypeStruct((8, 16), jnp.float32)
          >>> loss = lambda params: jnp.mean((ranks.recv(hidden, 0, after=params) @ params - y) ** 2)  # rank 1
        """
        return send_recv.recv(self, like, source, after, tag)

    def _divisible(self, x: jax.Array, what: str) -> jax.Array:
        if x.ndim == 0 or len(x) % self.size:
            raise ValueError(f"{what}: {x.dtype}{list(x.shape)} has no equal blocks of rows for {self.size} ranks")
        return x

    def _of_all(self, mine: Any, remedy: str) -> list[Any]:
        """Return all ranks' numbers of rows, by rank. Raises ValueError if they are unknown."""
        raise ValueError(f"a compiled program must know the numbers of rows of all ranks: {remedy}")

    def _checked_root(self, root: int) -> int:
        if not isinstance(root, int | np.integer) or not 0 <= root < self.size:
            raise ValueError(f"broadcast: the root must be a rank from 0 to {self.size - 1}, not {root!r}")
        return root

    def jit(self, function: Callable[..., Any], *, donate_argnums: int | Sequence[int] = ()) -> Callable[..., Any]:
        """Return ``jax.jit`` of a function that uses these collectives."""
        return jax.jit(function, donate_argnums=donate_argnums)

    def gather_same(self, x: Any) -> jax.Array:
        """Apply ``allgather``, with a result that JAX knows to be the same on all ranks."""
        return self.allgather(x)

    def localize(self, x: Any) -> Any:
        """Return a replicated value as this rank's own, whose gradient is that of this rank's loss alone."""
        return x

    def is_summed(self, gradient: Any) -> bool:
        """Return whether JAX has already summed a cotangent over the ranks, as it may on a mesh."""
        return False

    @abc.abstractmethod
    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        """Apply an operation to an array, concrete or traced, with its derivatives.

        Arguments:
          name: of a row of ``operations.OPERATIONS``, or "send" or "recv".
          how: the operation of an allreduce, the root of a broadcast, the route of a shift or a permutation.
        """


def _checked(what: str, x: Any, op: str = "sum") -> jax.Array:
    if op not in get_args(Reduction):
        raise ValueError(f"{what}: op must be one of {', '.join(map(repr, get_args(Reduction)))}, not {op!r}")
    array = to_jax(x)
    if array.dtype == bool or (op in ("max", "min") and jnp.issubdtype(array.dtype, jnp.complexfloating)):
        raise TypeError(f"{what}: no {op} of {array.dtype}. Cast it to a dtype that has one.")
    return array


def _extreme(collectives: Collectives, op: str, x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def extreme(x: jax.Array) -> jax.Array:
        return collectives.perform("allreduce", x, op)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = extreme(x)
        return y, x == y

    def backward(at: jax.Array, g: jax.Array) -> tuple[jax.Array]:
        share, total = at.astype(g.dtype), g if collectives.is_summed(g) else collectives.allreduce(g)
        return (total * share / collectives.allreduce(share),)

    extreme.defvjp(forward, backward)
    return extreme(x)


def require_collectives(what: str, given: Any, remedy: str = "A DataParallel has one: dp.collectives.") -> None:
    """Raise TypeError unless ``given`` is a group of ranks."""
    if not isinstance(given, Collectives):
        raise TypeError(
            f"{what}: collectives must be one of jd.collectives' MPI, Devices, Local, Mesh, not {given!r:.60}. {remedy}"
        )


def _each(function: Callable[[Any], Any], tree: Any) -> Any:
    """Map a function over a tree. A reference is a leaf, so that the function raises for it."""
    return jax.tree.map(function, tree, is_leaf=is_elsewhere)


def _edge_of(leaf: Any, edge: Any) -> jax.Array:
    """Return ``edge`` as an array like a leaf. Raises TypeError if the leaf's dtype cannot hold it."""
    x = to_jax(leaf)
    if jnp.issubdtype(x.dtype, jnp.inexact):  # floats may be rounded to other floats
        holds = jnp.iscomplexobj(x) or not jnp.iscomplexobj(edge)
    else:
        holds = jnp.result_type(x, edge) == x.dtype
    if not holds:
        kind = jnp.result_type(edge)
        raise TypeError(f"shift: {x.dtype} arrays cannot hold an edge of {kind}. Cast one of them.")
    return jnp.broadcast_to(jnp.asarray(edge, x.dtype), x.shape)


def _padded(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, [(0, count - len(x)), *[(0, 0)] * (x.ndim - 1)])
