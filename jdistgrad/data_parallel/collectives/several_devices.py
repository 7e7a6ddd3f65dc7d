"""Averages over ranks of arrays that lie on several devices of each rank.

Each device averages the part that it holds with the devices of the other ranks that hold the same part, so no part
moves within a rank, whatever its sharding is. An array that all devices of a rank hold whole is divided among these for
the reduction, and gathered again: between ranks it travels once, not once for each device.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdistgrad.data_parallel.buckets.bucket import join_flat
from jdistgrad.data_parallel.collectives.rank_devices import Place, UnusableDevicesError
from jdistgrad.data_parallel.collectives.spanning import Program, lies_oddly

RANKS, OWN = "jdistgrad_ranks", "jdistgrad_own_devices"


def on_several(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and len(leaf.sharding.device_set) > 1


class AllDevices:
    """All devices of the ranks of a group, a row for each rank, and this rank's own.

    Raises:
      UnusableDevicesError: the ranks have different numbers of devices.
    """

    def __init__(self, places: Sequence[Place], rank: int):
        counts = [len(place.all) for place in places]
        if len(set(counts)) > 1:
            odd = next(k for k, count in enumerate(counts) if count != counts[0])
            raise UnusableDevicesError(
                f"Devices: arrays lie on several devices of a rank, and the ranks have different numbers of these: "
                f"rank 0 has {counts[0]}, rank {odd} has {counts[odd]}. Give each rank equally many "
                "(CUDA_VISIBLE_DEVICES), or use collectives.MPI."
            )
        by_number = {device.id: device for device in jax.devices(places[0].platform)}
        table = np.array([[by_number[number] for number in place.all] for place in places])
        self.mesh, self.own = Mesh(table, (RANKS, OWN)), Mesh(table[rank], (OWN,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec((RANKS, OWN)))
        self.whole = NamedSharding(self.own, PartitionSpec())

    def on_all(self, leaf: Any) -> jax.Array:
        """Return a leaf on all devices of this rank, in the default layout: as it is, or a copy on each of them."""
        if not on_several(leaf) or leaf.sharding.device_set != self.whole.device_set:
            return jax.device_put(leaf, self.whole)
        return jax.jit(jnp.copy, out_shardings=leaf.sharding)(leaf) if lies_oddly(leaf) else leaf


class AverageOnAll(Program):
    """The averages of arrays over the ranks, each on the devices that hold it.

    Arguments:
      groups: the arrays that are reduced together, of one dtype, by their places.
      like: the arrays, of which only shapes, dtypes and shardings are kept.
      look: whether the last result tells, for each rank a row, the first array of each group that holds NaN or
        infinity: 1 plus its place in the group, 0 if all are finite.
    """

    def __init__(self, devices: AllDevices, groups: Sequence[Sequence[int]], like: Sequence[Any], *, look: bool):
        self._devices, self._before = devices, [leaf.sharding for leaf in like]
        on_all = [devices.on_all(leaf) for leaf in like]
        self._like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in on_all]
        self._whole = [leaf.sharding.is_fully_replicated for leaf in self._like]
        self._parts = [leaf.sharding.shard_shape(leaf.shape) for leaf in self._like]
        self._groups, self._look = [list(group) for group in groups], look
        rows = devices.sharding.spec
        spread = jax.shard_map(self._on_a_device, mesh=devices.mesh, in_specs=rows, out_specs=rows, check_vma=False)
        super().__init__(jax.jit(spread))

    @property
    def digest(self) -> int:
        """The same on all ranks whose arrays lie alike, and different from that of any other program."""
        kinds = [(part, str(leaf.dtype)) for part, leaf in zip(self._parts, self._like, strict=True)]
        facts = repr((kinds, self._whole, self._groups, self._look, self._devices.mesh.shape_tuple))
        return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=6).digest(), "big")

    def _on_a_device(self, *rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        parts = [_from_rows(x, shape) for x, shape in zip(rows, self._parts, strict=True)]
        averaged = list(parts)
        for group in self._groups:
            for places, average in ((self._of(group, whole=True), _of_copies), (self._of(group, whole=False), _mean)):
                if places:
                    flat = average(join_flat([parts[k] for k in places]))
                    for k, part in zip(places, jnp.split(flat, _ends([parts[k].size for k in places])), strict=True):
                        averaged[k] = part.reshape(parts[k].shape)
        faults = [self._faults(parts)] if self._look else []
        return [_as_rows(x) for x in (*averaged, *faults)], jnp.zeros(1, jnp.int8)

    def _of(self, group: Sequence[int], *, whole: bool) -> list[int]:
        return [k for k in group if self._whole[k] is whole]

    def _faults(self, parts: Sequence[jax.Array]) -> jax.Array:
        found = [jnp.zeros((), jnp.int32)]
        for group in self._groups:
            wrong = lax.pmax(jnp.stack([~jnp.isfinite(parts[k]).all() for k in group]).astype(jnp.int32), OWN)
            found.append(jnp.where(wrong.any(), 1 + jnp.argmax(wrong), 0).astype(jnp.int32))
        return lax.all_gather(jnp.stack(found)[1:], RANKS)

    def _shared(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [self._rows_of(self._devices.on_all(leaf)) for leaf in leaves]

    def _rows_of(self, leaf: jax.Array) -> jax.Array:
        """Return a global array whose rows are the parts of all devices."""
        here = {shard.device: _given_rows(shard.data, shard.device) for shard in leaf.addressable_shards}
        parts = [here[device] for device in self._devices.own.devices.flat]
        shape = (parts[0].shape[0] * self._devices.mesh.size, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._devices.sharding, parts)

    def _own(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        each = zip(results, self._like, self._parts, self._before, strict=False)
        own = [_put_together(x, like, part, before) for x, like, part, before in each]
        return [*own, *(x.addressable_data(0) for x in results[len(own) :])]


def _put_together(x: jax.Array, like: jax.ShapeDtypeStruct, part: tuple[int, ...], before: Any) -> jax.Array:
    """Return this rank's part of a global array, as an array with the sharding that it had before."""
    here = {shard.device: _from_rows(shard.data, part) for shard in x.addressable_shards}
    parts = [here[device] for device in like.sharding.addressable_devices]
    whole = jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
    return whole if like.sharding == before else jax.device_put(whole, before)


def _from_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(shape) if math.prod(shape) else x[:0].reshape(shape)


def _as_rows(x: jax.Array) -> jax.Array:
    """Return an array with rows: JAX would take a number, or an array without elements, for one that is replicated."""
    return x.reshape(x.shape or 1) if x.size else jnp.zeros(1, x.dtype)


def _given_rows(x: jax.Array, device: Any) -> jax.Array:
    return _as_rows(x) if x.size else jax.device_put(np.zeros(1, x.dtype), device)


def _mean(flat: jax.Array) -> jax.Array:
    return lax.psum(flat / lax.axis_size(RANKS), RANKS)


def _of_copies(flat: jax.Array) -> jax.Array:
    """Average an array that all devices of a rank hold: each averages its part of it."""
    count = lax.axis_size(OWN)
    parts = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    mine = lax.dynamic_index_in_dim(parts, lax.axis_index(OWN), keepdims=False)
    return lax.all_gather(_mean(mine), OWN, tiled=True)[: flat.size]


def _ends(sizes: Sequence[int]) -> list[int]:
    return np.cumsum(sizes)[:-1].tolist()
