"""Whether a tree is the same on all ranks, bit for bit, and where not."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdistgrad.data_parallel.leaves import Leaf
from jdistgrad.errors import DisagreementError

Gather = Callable[[Any], list[Any]]


def verify(leaves: Sequence[Leaf], arrays: Sequence[np.ndarray], gather: Gather) -> None:
    """Compare every leaf with rank 0's.

    Raises:
      DisagreementError: naming the leaf, the first place in it that differs, the rank and both values.
    """
    digests = gather([hashlib.blake2b(array.tobytes(), digest_size=16).digest() for array in arrays])
    for place, leaf in enumerate(leaves):
        if len({its[place] for its in digests}) > 1:
            _tell(leaf, gather(arrays[place]))


def _tell(leaf: Leaf, values: Sequence[np.ndarray]) -> None:
    first = values[0].reshape(-1)
    for rank, value in enumerate(values):
        other = value.reshape(-1)
        if first.tobytes() != other.tobytes():
            octets = (np.frombuffer(flat.tobytes(), np.uint8).reshape(first.size, -1) for flat in (first, other))
            at = int(np.flatnonzero(np.not_equal(*octets).any(axis=1))[0])
            where = tuple(int(i) for i in np.unravel_index(at, leaf.shape))
            raise DisagreementError(
                f"the ranks have drifted apart: {leaf.path}{list(where)} is {first[at]} on rank 0, {other[at]} on rank "
                f"{rank}. Broadcast from rank 0, and look for updates that not every rank makes.",
                rank=rank,
                path=leaf.path,
            )
