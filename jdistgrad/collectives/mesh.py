"""Collectives over the devices along a mesh axis, inside ``jax.shard_map``, by XLA."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdistgrad._compat import varies_over
from jdistgrad.collectives.base import Collectives
from jdistgrad.collectives.operations import OPERATIONS, Route, keeping_nans
from jdistgrad.errors import CollectiveError
from jdistgrad.ffi.abi import carrier
from jdistgrad.rpc.worker import find_worker

log = logging.getLogger("jdistgrad.data_parallel")


class Mesh(Collectives):
    """Collectives with the devices along one or several mesh axes as ranks.

    Derivatives are those of ``lax.psum`` and its relatives. Under ``check_vma=False``, and wherever a rank's loss is
    typed as varying over the axis, they are as in other collectives: of the sum of all ranks' losses.

    Arguments:
      axis_name: the axis of the mesh, as given to ``jax.shard_map`` or ``jax.pmap``.
    """

    def __init__(self, axis_name: Any):
        self.axis_name = axis_name
        self._axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        worker = find_worker()
        if worker is not None and worker.survives and jax.distributed.is_initialized():
            log.warning(
                "%r: a mesh over several processes does not survive the death of one: jax.distributed ends all of "
                "them. Steps over MPI that are called from Python survive.",
                self,
            )

    def __repr__(self) -> str:
        return f"Mesh({self.axis_name!r})"

    @property
    def rank(self) -> jax.Array:
        return self._within(lax.axis_index)

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._within(lax.axis_size)

    def _within(self, query: Any) -> Any:
        try:
            return query(self.axis_name)
        except NameError as error:
            raise CollectiveError(
                f"{self!r}: there is no mesh axis of that name here. Call it inside jax.shard_map over that axis."
            ) from error

    def _of_all(self, mine: Any, remedy: str) -> list[Any]:
        return [mine] * self.size

    def perform(self, name: str, x: jax.Array, how: Any = None) -> jax.Array:
        here, carried = self.rank, _carrier(x.dtype)  # raises where there is no such axis
        if carried != x.dtype:
            return self.perform(name, x.astype(carried), how).astype(x.dtype)
        axis = self.axis_name
        if name == "allreduce":
            reducers = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
            return keeping_nans(lambda x, op: reducers[op](x, axis), x, how)
        if name == "broadcast":
            kept = jnp.where(here == how, x, jnp.zeros_like(x))
            return lax.psum(kept.astype(jnp.int8), axis).astype(bool) if x.dtype == bool else lax.psum(kept, axis)
        if name == "alltoall":
            return lax.all_to_all(x, axis, 0, 0, tiled=True)
        if name == "reduce_scatter":  # XLA does not support blocks without rows
            return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True) if x.size else x[: len(x) // self.size]
        if isinstance(how, Route):
            return lax.ppermute(x, *self._in_order_of_mesh(how.pairs))
        rows = lax.all_gather(x, axis)
        return rows if name == "allgather" else OPERATIONS[name].result(rows, here, how).astype(x.dtype)

    def _in_order_of_mesh(self, pairs: Sequence[tuple[int, int]]) -> tuple[Any, list[tuple[int, int]]]:
        """Return the axes in the mesh's order, by which ``ppermute`` numbers ranks, and pairs of ranks numbered so."""
        axes, known = self._axes, jax.sharding.get_abstract_mesh().axis_names
        if not set(axes) <= set(known):
            return self.axis_name, list(pairs)
        order = sorted(range(len(axes)), key=lambda k: known.index(axes[k]))
        ranks = np.arange(self.size).reshape([lax.axis_size(axis) for axis in axes])
        number = np.argsort(ranks.transpose(order).ravel()).tolist()
        return tuple(axes[k] for k in order), [(number[sender], number[receiver]) for sender, receiver in pairs]

    def gather_same(self, x: jax.Array) -> jax.Array:
        """Gather with a result typed as the same on all ranks; JAX types a gather's result as varying."""
        if not self._typed():
            return self.perform("allgather", jnp.asarray(x))
        carried = x.astype(_carrier(x.dtype))
        rows = jnp.zeros((self.size, *x.shape), carried.dtype).at[self.rank].set(carried)
        return lax.psum(rows, self.axis_name).astype(x.dtype)

    def localize(self, x: jax.Array) -> jax.Array:
        axes = [axis for axis in self._axes if axis not in self._varying(x)] if self._typed() else []
        return lax.pcast(x, tuple(axes), to="varying") if axes else x

    def is_summed(self, gradient: jax.Array) -> bool:
        """Return whether JAX has summed a gradient over the axis, as it does for parameters typed as replicated."""
        return self._typed() and not set(self._axes) & self._varying(gradient)

    def _typed(self) -> bool:
        return bool(self._varying(self.rank))

    @staticmethod
    def _varying(x: jax.Array) -> set[Any]:
        return set(varies_over(jax.typeof(x)))


def _carrier(dtype: Any) -> Any:
    """Return the dtype in which devices exchange arrays of a dtype that XLA packs, or that has no zero."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jnp.dtype(jnp.float32 if dtype == jnp.float8_e8m0fnu else carrier(dtype))
