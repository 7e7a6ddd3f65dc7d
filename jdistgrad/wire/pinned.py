"""Copies of accelerators' arrays in pinned host memory, which the device reads and writes by itself.

A copy to memory that is not pinned takes several times as long, and the process waits for it.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jdistgrad._compat import backends_are_initialized

PINNED = "pinned_host"


def is_far(device: Any) -> bool:
    return bool(device.platform != "cpu")


@functools.lru_cache(maxsize=256)
def in_pinned_memory(sharding: Any) -> Any:
    """Return a sharding in the device's pinned host memory; None for host memory, several devices or no pinned one."""
    (device, *others) = sharding.device_set
    if others or not is_far(device) or sharding.memory_kind == PINNED:
        return None
    if PINNED not in {memory.kind for memory in device.addressable_memories()}:
        return None
    return sharding.with_memory_kind(PINNED)


def copies(arrays: Sequence[jax.Array]) -> list[jax.Array] | None:
    """Begin to copy arrays to pinned host memory; None if one of them cannot or need not be."""
    places = [in_pinned_memory(array.sharding) for array in arrays]
    if not places or None in places:
        return None
    with jax.ensure_compile_time_eval():  # calls are also made while JAX traces, which would trace the copy
        made: list[jax.Array] = jax.device_put(list(arrays), places)
    return made


class Copies:
    """Copies of the accelerators' arrays among some leaves, all begun at once."""

    def __init__(self, leaves: Iterable[Any]):
        found = []
        with contextlib.suppress(RecursionError):  # nested too deeply: those arrays are copied one by one
            for leaf in leaves:
                if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                    found += [leaf] if in_pinned_memory(leaf.sharding) else []
        # With the arrays themselves: another array could get the id of one that is gone.
        self._by_id = {id(leaf): (leaf, copy) for leaf, copy in zip(found, copies(found) or (), strict=True)}

    def of(self, array: jax.Array) -> jax.Array:
        """Return the copy of an array, or the array itself if there is none."""
        return self._by_id.get(id(array), (array, array))[1]


NONE = Copies(())
_accelerated: bool | None = None  # None: unknown before JAX has opened its devices


def accelerated() -> bool:
    """Return whether this process computes on accelerators, without opening devices."""
    global _accelerated
    if _accelerated is None and backends_are_initialized():
        _accelerated = any(map(is_far, jax.local_devices()))
    return bool(_accelerated)
