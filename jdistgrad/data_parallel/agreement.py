"""The terms that must be the same on all ranks before a reduction: their digest, and the first difference in words."""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.leaves import Leaf
from jdistgrad.errors import DisagreementError

SHOWN = 160  # characters of a static part, in an error

Settings = tuple[tuple[str, str], ...]


class Terms(NamedTuple):
    """A rank's tree of gradients and its settings. ``static``: the parts of the tree that hold no leaves."""

    leaves: tuple[Leaf, ...]
    settings: Settings
    static: tuple[str, ...] = ()

    def digest(self) -> int:
        facts = ([(leaf.path, leaf.shape, str(leaf.dtype), leaf.sparse) for leaf in self.leaves], self[1:])
        return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")


def require_agreement(terms: Mapping[int, Terms]) -> None:
    """Compare the terms of several ranks with the lowest rank's. DisagreementError names what differs, and both."""
    first = min(terms)
    for rank in sorted(terms):
        difference = _difference(terms[first], terms[rank], first, rank)
        if difference:
            raise DisagreementError(
                f"the ranks do not agree on what is to be reduced, so nothing was: {difference}. Give every rank the "
                "same parameters and the same settings.",
                rank=rank,
            )


def _difference(ours: Terms, theirs: Terms, first: int, rank: int) -> str | None:
    a, b = len(ours.leaves), len(theirs.leaves)
    counts = f" ({a} leaves against {b})" if a != b else ""
    for (name, value), (_, other) in zip(ours.settings, theirs.settings, strict=True):
        if value != other:
            return f"{name} is {value} on rank {first}, {other} on rank {rank}"
    for mine, its in zip(ours.leaves, theirs.leaves, strict=False):
        if mine.path != its.path:
            return f"leaf {mine.path} of rank {first} stands where rank {rank} has {its.path}{counts}"
        if mine != its:
            return f"the leaf {mine.path} is {mine} on rank {first}, {its} on rank {rank}"
    if a != b:
        more, here, there = (ours, first, rank) if a > b else (theirs, rank, first)
        extra = more.leaves[min(a, b)]
        return f"rank {here} has the leaf {extra.path} ({extra}), rank {there} has none there{counts}"
    for part, other_part in itertools.zip_longest(ours.static, theirs.static, fillvalue="nothing"):
        if part != other_part:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(part, other_part, strict=False))
            begin = max(0, sum(1 for _ in same) - SHOWN // 2)
            shown = [f"{one[begin:]:.{SHOWN}}" for one in (part, other_part)]
            return f"a static part of the tree is {shown[0]} on rank {first}, {shown[1]} on rank {rank}"
    return None


CHUNKS = 64


def bit_digests(leaves: Sequence[Any]) -> list[int]:
    """Return a digest of the bits of each leaf, at the speed of memory; 0 for what the ranks hold together."""
    found = []
    for leaf in leaves:
        if not getattr(leaf, "is_fully_addressable", True):
            found.append(0)
            continue
        array = np.asarray(leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf))
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        words = octets[: octets.size // 8 * 8].view(np.uint64)
        even = words.size // CHUNKS * CHUNKS  # a sum for each of some large parts, so that their order counts
        sums = words[:even].reshape(CHUNKS, even // CHUNKS).sum(axis=1, dtype=np.uint64)
        rest = words[even:].tobytes() + octets[words.size * 8 :].tobytes()
        found.append(int.from_bytes(hashlib.blake2b(sums.tobytes() + rest, digest_size=8).digest(), "little"))
    return found


def require_same_parameters(leaves: Sequence[Leaf], digests: Mapping[int, Sequence[int]]) -> None:
    first = min(digests, default=0)
    for place, leaf in enumerate(leaves):
        others = [rank for rank, mine in digests.items() if mine[place] != digests[first][place]]
        if others:
            raise DisagreementError(
                f"the ranks start from different parameters: {leaf.path} of rank {', '.join(map(str, others))} is not "
                f"that of rank {first}. Give all ranks those of one, params = dp.broadcast(params), before the first "
                "step. If they are to differ: DataParallel(check_parameters=False).",
                rank=others[0],
                path=leaf.path,
            )


Gather = Callable[[Any], list[Any]]


def require_same_bits(leaves: Sequence[Leaf], arrays: Sequence[np.ndarray], gather: Gather) -> None:
    """Compare every leaf with rank 0's. DisagreementError names the leaf, the first place, the rank and both values."""
    digests = gather([hashlib.blake2b(array.tobytes(), digest_size=16).digest() for array in arrays])
    for place, leaf in enumerate(leaves):
        if len({its[place] for its in digests}) == 1:
            continue
        first, *others = (value.reshape(-1) for value in gather(arrays[place]))
        for rank, other in enumerate(others, 1):
            if first.tobytes() == other.tobytes():
                continue
            octets = (np.frombuffer(flat.tobytes(), np.uint8).reshape(first.size, -1) for flat in (first, other))
            at = int(np.flatnonzero(np.not_equal(*octets).any(axis=1))[0])
            where = tuple(int(i) for i in np.unravel_index(at, leaf.shape))
            raise DisagreementError(
                f"the ranks have drifted apart: {leaf.path}{list(where)} is {first[at]} on rank 0, {other[at]} on rank "
                f"{rank}. Broadcast from rank 0, and look for updates that not every rank makes.",
                rank=rank,
                path=leaf.path,
            )
