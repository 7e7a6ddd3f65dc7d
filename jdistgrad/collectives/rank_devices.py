"""The devices of the ranks of a group: one for each rank, together a mesh with one axis."""

import hashlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jdistgrad._compat import configured
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.devices import cuda_uuid


class UnusableDevicesError(CollectiveError):
    """XLA's collectives cannot span the devices of these ranks. All ranks raise it."""


class Place(NamedTuple):
    """A rank's device, as it tells the others.

    ``processes``: how many processes this one is connected with. ``card``: the id of the GPU, or "" if it is unknown.
    """

    processes: int
    device: int
    platform: str
    kind: str
    host: str
    card: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.platform}) on {self.host}"


def default_device() -> jax.Device:
    chosen = configured("jax_default_device")
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def of_this_rank() -> tuple[jax.Device, Place]:
    """Return the device that this rank computes on, and what it tells the others of it."""
    device = default_device()
    card = "" if device.platform == "cpu" else cuda_uuid(device.local_hardware_id or 0)
    return device, Place(
        jax.process_count(), device.id, device.platform, device.device_kind, socket.gethostname(), card
    )


def require_usable(places: Sequence[Place]) -> None:
    """Raise UnusableDevicesError unless XLA's collectives can span the devices of these ranks.

    Arguments:
      places: the devices of all ranks, by rank.
    """
    alone = [rank for rank, place in enumerate(places) if place.processes < len(places)]
    if alone:
        raise UnusableDevicesError(
            f"Devices: ranks {alone} of {len(places)} see only their own devices, so XLA's collectives do not reach "
            "the others. Call jd.init(devices=True), on every rank, before the first array; or start jax.distributed."
        )
    kinds = {(place.platform, place.kind): rank for rank, place in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        one, other = sorted(kinds.values())[:2]
        raise UnusableDevicesError(
            f"Devices: the ranks have different kinds of devices: rank {one} has {places[one]}, rank {other} has "
            f"{places[other]}. XLA's collectives need one kind: choose it with JAX_PLATFORMS, or leave nodes out."
        )
    owners: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        if not place.card:
            continue
        owner = owners.setdefault((place.host, place.card), rank)
        if owner != rank:
            raise UnusableDevicesError(
                f"Devices: ranks {owner} and {rank} share a GPU of {place.host} ({place.card}), which NCCL refuses. "
                "Give each rank its own (CUDA_VISIBLE_DEVICES, or as many ranks on a node as it has GPUs), or use "
                "collectives.MPI."
            )


def mesh_of(places: Sequence[Place]) -> jax.sharding.Mesh:
    """Return the mesh of the ranks' devices, in the order of the ranks.

    The name of its axis is different for each group: JAX keeps traces of functions by such names.
    """
    devices = {device.id: device for device in jax.devices(places[0].platform)}
    numbers = ",".join(str(place.device) for place in places)
    axis = f"jdistgrad_ranks_{hashlib.blake2b(numbers.encode(), digest_size=4).hexdigest()}"
    return jax.sharding.Mesh(np.array([devices[place.device] for place in places]), (axis,))
