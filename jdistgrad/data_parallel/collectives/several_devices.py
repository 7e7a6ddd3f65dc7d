"""Arrays that do not simply lie on the device of their rank, and averages over ranks of those on several devices.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jdistgrad.data_parallel.buckets.bucket import join_flat
from jdistgrad.data_parallel.buckets.dividing import divided
from jdistgrad.data_parallel.collectives.rank_devices import Place
from jdistgrad.data_parallel.collectives.spanning import Program, lies_oddly

RANKS, OWN = "jdistgrad_ranks", "jdistgrad_own_devices"


def on_several(leaf: Any) -> bool:
    """Return whether a leaf is an array of this process that lies on several devices."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    return len(leaf.sharding.device_set) > 1 and leaf.is_fully_addressable


def lies_elsewhere(leaf: Any, device: jax.Device) -> bool:
    """Return whether a leaf is an array of this process on several devices, on another one of its kind, or on a mesh.

    A mesh of one device counts too, since its axis is in the array's type.
    """
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    if not isinstance(leaf.sharding, SingleDeviceSharding):
        return leaf.is_fully_addressable
    own: Any = next(iter(leaf.sharding.device_set))
    return own != device and own.platform == device.platform


def without_mesh(leaf: Any) -> Any:
    """Return a leaf; of an array on a mesh of one device, what the device holds."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or len(leaf.sharding.device_set) > 1:
        return leaf
    return leaf if isinstance(leaf.sharding, SingleDeviceSharding) else leaf.addressable_data(0)


def on_one(tree: Any, device: jax.Device) -> Any:
    """Return a tree whose arrays that lie elsewhere are copied to one device, and forget the meshes of their types."""

    def moved(leaf: Any) -> Any:
        if not lies_elsewhere(leaf, device):
            return leaf
        return jax.device_put(np.asarray(leaf) if on_several(leaf) else without_mesh(leaf), device)

    return jax.tree.map(moved, tree)


def back(tree: Any, like: Any, device: jax.Device) -> Any:
    """Return a tree with the shardings of those arrays of another that do not simply lie on a device."""

    def put(x: Any, old: Any) -> Any:
        return jax.device_put(x, old.sharding) if lies_elsewhere(old, device) and x.sharding != old.sharding else x

    return jax.tree.map(put, tree, like)


def refusal(places: Sequence[Place]) -> str:
    """Return why the ranks' arrays on several devices cannot be reduced device by device; "" if they can."""
    counts = [len(place.all) for place in places]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            return f"rank 0 has {counts[0]} devices, rank {rank} has {count}"
    owners: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        for card in filter(None, place.cards):
            owner = owners.setdefault((place.host, card), rank)
            if owner != rank:
                return f"ranks {owner} and {rank} share a GPU of {place.host} ({card})"
    return ""


class AllDevices:
    """All devices of the ranks of a group, a row for each rank, and this rank's own."""

    def __init__(self, places: Sequence[Place], rank: int):
        by_number = {device.id: device for device in jax.devices(places[0].platform)}
        table = np.array([[by_number[number] for number in place.all] for place in places])
        self.mesh, self.own = Mesh(table, (RANKS, OWN)), Mesh(table[rank], (OWN,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec((RANKS, OWN)))
        self.whole = NamedSharding(self.own, PartitionSpec())

    def sharding_of(self, leaf: Any) -> Any:
        """Return the sharding of a leaf on all devices of this rank: its own, or a copy on each of them."""
        return leaf.sharding if leaf.sharding.device_set == self.whole.device_set else self.whole

    def on_all(self, leaf: Any) -> jax.Array:
        """Return a leaf on all devices of this rank, in the default layout."""
        if self.sharding_of(leaf) is self.whole:
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
        sharding_of = devices.sharding_of
        self._like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf)) for leaf in like]
        self._whole = [leaf.sharding.is_fully_replicated for leaf in self._like]
        self._parts = [leaf.sharding.shard_shape(leaf.shape) for leaf in self._like]
        self._groups, self._look = [list(group) for group in groups], look
        rows = devices.sharding.spec
        spread = jax.shard_map(self._on_a_device, mesh=devices.mesh, in_specs=rows, out_specs=rows, check_vma=False)
        super().__init__(devices.mesh, jax.jit(spread))

    @property
    def digest(self) -> int:
        """The same on all ranks whose arrays lie alike, and different from that of any other program."""
        kinds = [(leaf.shape, str(leaf.dtype), self._places(leaf)) for leaf in self._like]
        facts = repr((kinds, self._groups, self._look, self._devices.mesh.shape_tuple))
        return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=6).digest(), "big")

    def _places(self, leaf: jax.ShapeDtypeStruct) -> list[list[tuple[int, int, int]]]:
        """Return the part of a leaf that each device of this rank holds, in the devices' order."""
        indices = leaf.sharding.devices_indices_map(leaf.shape)
        parts = [indices[device] for device in self._devices.own.devices.flat]
        return [[cut.indices(size) for cut, size in zip(part, leaf.shape, strict=True)] for part in parts]

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
        wrong = [lax.pmax(~jnp.isfinite(part).all(), OWN) for part in parts]
        return lax.all_gather(first_faults(self._groups, wrong), RANKS)

    def _shared(self, leaves: Sequence[Any]) -> list[jax.Array]:
        return [self._rows_of(self._devices.on_all(leaf)) for leaf in leaves]

    def _rows_of(self, leaf: jax.Array) -> jax.Array:
        """Return a global array whose rows are the parts of all devices."""
        rows = leaf if leaf.ndim else leaf.reshape(1)
        here: dict[jax.Device, jax.Array] = {shard.device: shard.data for shard in rows.addressable_shards}
        if not leaf.size:
            here = {device: jax.device_put(np.zeros(1, leaf.dtype), device) for device in here}
        parts = [here[device] for device in self._devices.own.devices.flat]
        shape = (parts[0].shape[0] * self._devices.mesh.size, *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._devices.sharding, parts)

    def _own(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        each = zip(results, self._like, self._before, strict=False)
        own = [_put_together(x, like, before) for x, like, before in each]
        return [*own, *(x.addressable_data(0) for x in results[len(own) :])]


def _put_together(x: jax.Array, like: jax.ShapeDtypeStruct, before: Any) -> jax.Array:
    """Return this rank's part of a global array, as an array with the sharding that it had before."""
    if not math.prod(like.shape):
        return jax.device_put(np.zeros(like.shape, like.dtype), before)
    here = {shard.device: shard.data for shard in x.addressable_shards}
    parts = [here[device] for device in like.sharding.addressable_devices]
    whole: jax.Array = jax.make_array_from_single_device_arrays(like.shape or (1,), like.sharding, parts)
    whole = whole if like.shape else whole.reshape(())
    return whole if like.sharding == before else jax.device_put(whole, before)


def _from_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(shape) if math.prod(shape) else x[:0].reshape(shape)


def first_faults(groups: Sequence[Sequence[int]], wrong: Sequence[jax.Array]) -> jax.Array:
    """Return for each group of arrays 0, or 1 plus the place of the first that is wrong."""
    found = [jnp.zeros((), jnp.int32)]
    for group in groups:
        flags = jnp.stack([wrong[k] for k in group])
        found.append(jnp.where(flags.any(), 1 + jnp.argmax(flags), 0).astype(jnp.int32))
    return jnp.stack(found)[1:]


def _as_rows(x: jax.Array) -> jax.Array:
    """Return an array with rows: JAX would take a number, or an array without elements, for one that is replicated."""
    return x.reshape(x.shape or 1) if x.size else jnp.zeros(1, x.dtype)


def _mean(flat: jax.Array) -> jax.Array:
    return lax.psum(divided(flat, lax.axis_size(RANKS)), RANKS)


def _of_copies(flat: jax.Array) -> jax.Array:
    """Average an array that all devices of a rank hold: each averages its part of it."""
    count = lax.axis_size(OWN)
    parts = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    mine = lax.dynamic_index_in_dim(parts, lax.axis_index(OWN), keepdims=False)
    return lax.all_gather(_mean(mine), OWN, tiled=True)[: flat.size]


def _ends(sizes: Sequence[int]) -> list[int]:
    return np.cumsum(sizes)[:-1].tolist()
