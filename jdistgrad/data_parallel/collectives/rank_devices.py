"""The devices of the ranks of a group: one for each rank, together a mesh with one axis."""

import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jdistgrad._compat import configured
from jdistgrad.errors import CollectiveError
from jdistgrad.rpc.devices import visible_gpus

AXIS = "jdistgrad_ranks"


class Place(NamedTuple):
    """A rank's device, as it tells the others. ``device``: its number in the job; ``card``: its name on the host."""

    processes: int
    device: int
    platform: str
    kind: str
    host: str
    card: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.platform}) on {self.host}"


def of_this_rank() -> tuple[jax.Device, Place]:
    """Return the device that this rank computes on: JAX's default device, or the first one that it sees."""
    chosen = configured("jax_default_device")
    device = chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]
    cards, number = visible_gpus(), device.local_hardware_id or 0
    card = cards[number] if number < len(cards) else str(number)
    place = Place(jax.process_count(), device.id, device.platform, device.device_kind, socket.gethostname(), card)
    return device, place


def require_usable(places: Sequence[Place]) -> None:
    """Raise CollectiveError unless XLA's collectives can span the devices of these ranks.

    Arguments:
      places: the devices of all ranks, by rank.
    """
    alone = [rank for rank, place in enumerate(places) if place.processes < len(places)]
    if alone:
        raise CollectiveError(
            f"Devices: ranks {alone} of {len(places)} see only their own devices, so XLA's collectives do not reach "
            "the others. Call jd.init(devices=True), on every rank, before the first array; or start jax.distributed."
        )
    kinds = {(place.platform, place.kind): rank for rank, place in reversed(list(enumerate(places)))}
    if len(kinds) > 1:
        one, other = sorted(kinds.values())[:2]
        raise CollectiveError(
            f"Devices: the ranks have different kinds of devices: rank {one} has {places[one]}, rank {other} has "
            f"{places[other]}. XLA's collectives need one kind: choose it with JAX_PLATFORMS, or leave nodes out."
        )
    _require_own_cards(places)


def _require_own_cards(places: Sequence[Place]) -> None:
    owners: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        if place.platform == "cpu":
            continue
        owner = owners.setdefault((place.host, place.card), rank)
        if owner != rank:
            raise CollectiveError(
                f"Devices: ranks {owner} and {rank} share the GPU {place.card} of {place.host}, which NCCL refuses. "
                "Give each rank its own (CUDA_VISIBLE_DEVICES, or as many ranks on a node as it has GPUs), or use "
                "collectives.MPI."
            )


def mesh_of(places: Sequence[Place]) -> jax.sharding.Mesh:
    """Return the mesh of the ranks' devices, in the order of the ranks."""
    devices = {device.id: device for device in jax.devices()}
    return jax.sharding.Mesh(np.array([devices[place.device] for place in places]), (AXIS,))
