"""A look at the leaves that all callers are said to have alike, of which only the first caller's are written."""

import logging
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdistgrad.errors import CheckpointError, DisagreementError
from jdistgrad.rpc.worker import current_worker
from jdistgrad.saving.leaves import Description, data, described, fits, is_number, spelled

LOOKED_AT = 1 << 20  # bytes of a leaf: what a rank has for itself differs nearly everywhere

log = logging.getLogger("jdistgrad.saving")


class Look(NamedTuple):
    """What a caller tells of a leaf: its description, and a checksum of its first bytes."""

    description: Description
    checksum: int


Looks = Mapping[str, Look]  # by place


def looks_at(leaves: Iterable[tuple[str, Any]]) -> dict[str, Look]:
    """Look at leaves, each with its place, leaving out those that cannot be saved: the writing of them says why."""
    found: dict[str, Look] = {}
    for place, leaf in leaves:
        try:
            description = described(leaf, place)
        except CheckpointError:
            continue
        found[place] = Look(description, _checksum(leaf, description))
    return found


def _checksum(leaf: Any, description: Description) -> int:
    if is_number(description):
        number = leaf if "value" in description else np.asarray(leaf).item()
        return hash(number) if number == number else 1  # equal for equal numbers of all types; not a NaN's
    if "value" in description:
        return zlib.crc32(repr(description["value"]).encode())
    if not hasattr(leaf, "nbytes") or not (leaf.nbytes <= LOOKED_AT or _is_in_host_memory(leaf)):
        return 0
    host = data(leaf)
    return 0 if host is None else zlib.crc32(np.ravel(host)[: LOOKED_AT // host.itemsize].tobytes())


def _is_in_host_memory(leaf: Any) -> bool:
    """Return whether a leaf can be read where it is: large ones are not copied from other devices for a look."""
    return not isinstance(leaf, jax.Array) or all(device.platform == "cpu" for device in leaf.devices())


def compare(looks: Mapping[int, Looks], leader: int) -> None:
    """Compare what the callers have, by rank, with what the leader has, which is saved for all of them.

    Raises:
      DisagreementError: a leaf is of another kind.
    """
    workers = current_worker().directory.workers
    for place, mine in looks[leader].items():
        others = {rank: theirs[place] for rank, theirs in looks.items() if place in theirs}
        for rank, other in others.items():
            if not fits(mine.description, other.description):
                has, expected = spelled(other.description), spelled(mine.description)
                raise DisagreementError(
                    f"{place} is {expected} on {workers[leader]}, {has} on {workers[rank]}. Mark what is not the same "
                    "on all workers: jd.per_worker(tree), or jd.sharded(tx, state, params). Nothing was saved."
                )
        different = [rank for rank, other in others.items() if other.checksum != mine.checksum]
        if different:
            log.warning(
                "save: %s is not the same on ranks %s. What %s has is saved for all of them. Mark what is not the same "
                "on all workers: jd.per_worker(tree), or jd.sharded(tx, state, params).",
                place,
                ", ".join(map(str, [leader, *different])),
                workers[leader],
            )
            return  # one is enough to see what is missing
