"""Arrays of accelerators on their way through host memory: pinned memory, which the device reads and writes by itself.

A copy to memory that is not pinned takes several times as long, and the process waits for it.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jdistgrad._compat import backends_are_initialized

PINNED = "pinned_host"


def is_far(device: Any) -> bool:
    """Return whether a device's memory is not the host's."""
    return bool(device.platform != "cpu")


@functools.lru_cache(maxsize=256)
def in_pinned_memory(sharding: Any) -> Any:
    """Return a sharding with the same device, but in pinned host memory.

    Returns None for an array that lies in host memory, or on several devices, or on one without pinned memory.
    """
    (device, *others) = sharding.device_set
    if others or not is_far(device) or sharding.memory_kind == PINNED:
        return None
    if PINNED not in {memory.kind for memory in device.addressable_memories()}:
        return None
    return sharding.with_memory_kind(PINNED)


def copies(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Begin to copy arrays to pinned host memory; None if one of them cannot be, or need not be, copied there."""
    places = [in_pinned_memory(array.sharding) for array in arrays]
    if not places or None in places:
        return None
    with jax.ensure_compile_time_eval():  # calls are also made while JAX traces, which would trace the copy
        made: list[jax.Array] = jax.device_put(list(arrays), places)
    return made


class Copies:
    """Copies of arrays in pinned host memory, all begun at once, so that the device is not waited for one by one."""

    def __init__(self, leaves: Iterable[Any]):
        found = [
            leaf
            for leaf in leaves
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and in_pinned_memory(leaf.sharding)
        ]
        # With the arrays themselves: another array could get the number of one that is gone.
        self._by_id = {id(leaf): (leaf, copy) for leaf, copy in zip(found, copies(found) or (), strict=True)}

    def of(self, array: jax.Array) -> jax.Array:
        """Return the copy of an array, or the array itself if there is none."""
        return self._by_id.get(id(array), (array, array))[1]


NONE = Copies(())


def of_all(leaves: Iterable[Any]) -> Copies:
    """Return copies of the arrays on accelerators among some leaves.

    What contains itself, or is nested too deeply, has no leaves: its arrays are copied one by one.
    """
    try:
        return Copies(leaves)
    except RecursionError:
        return NONE


_accelerated: bool | None = None  # None: not known before JAX has opened its devices


def accelerated() -> bool:
    """Return whether this process computes on accelerators. Devices are not opened to find out."""
    global _accelerated
    if _accelerated is None and backends_are_initialized():
        _accelerated = any(map(is_far, jax.local_devices()))
    return bool(_accelerated)
