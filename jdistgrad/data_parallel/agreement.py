"""What ranks must agree on before they reduce: trees, settings, parameters; and the plan of buckets that follows."""

import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdistgrad.collectives.descriptions import Leaf, describe, flatten, require_inexact, static_parts
from jdistgrad.collectives.roll_call import Act, Joining
from jdistgrad.data_parallel.buckets import Bucket, Cap, lay_out, limits_of, plan_buckets
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.statistics import BucketTimes
from jdistgrad.errors import DisagreementError, HookError, LeafError

SHOWN = 160  # characters of a static part, in an error

Settings = tuple[tuple[str, str], ...]


class Terms(NamedTuple):
    """A rank's tree of gradients and its settings. ``static``: the parts of the tree without leaves."""

    leaves: tuple[Leaf, ...]
    settings: Settings
    static: tuple[str, ...] = ()

    def digest(self) -> int:
        facts = ([(leaf.path, leaf.shape, str(leaf.dtype), leaf.sparse) for leaf in self.leaves], self[1:])
        return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little")


def require_agreement(terms: Mapping[int, Terms]) -> None:
    """Compare the terms of several ranks with those of the lowest; DisagreementError names the first difference."""
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


def digest_of(leaf: Any) -> bytes:
    """Return a digest of a leaf's bits; an empty one for an array that several ranks hold together."""
    if not getattr(leaf, "is_fully_addressable", True):
        return b""
    array = np.asarray(leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf))
    octets: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(octets).digest()


def require_same_parameters(leaves: Sequence[Leaf], digests: Mapping[int, Sequence[bytes]]) -> None:
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
    """Compare every leaf with rank 0's; DisagreementError names the leaf, the first index, the rank and both values."""
    digests = gather(list(map(digest_of, arrays)))
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


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets that the ranks have agreed on for one tree of gradients.

    ``bucketed``: the leaves in the order of the buckets. ``bucket_of``: the bucket of each leaf.
    """

    terms: Terms
    digest: int
    order: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    bucketed: list[int]
    bucket_of: dict[int, int]


class PlannedStep(NamedTuple):
    """A step, or an average of given gradients, with the buckets that the ranks have agreed on.

    Attributes:
      structure: the structure of the gradients.
      code: the function that computes the gradients; of ``OnDevice``, this rank's own step.
      used: the parameters that the loss depends on; None for given gradients.
      program: over devices, the program that also averages the gradients, which are its first results. None if the
        loss calls Python (other workers, for example), where one rank may fail while the others wait in the program for
        ever; or if its arguments are on several devices.
      digest: equal for equal programs.
      results: the structure of the program's other results: value, and aux if any.
    """

    plan: BucketPlan
    structure: Any
    code: Any
    used: Sequence[bool] | None = None
    program: Any = None
    digest: int = 0
    results: Any = None


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of ``DataParallel``, which describes them."""

    bucket_cap_mb: Cap = None
    find_unused_parameters: bool = False
    hook: Hook | None = None
    sparse: Collection[str] = ()
    check_finite: bool = False
    check_parameters: bool = True
    timeout: float = 300.0

    def __post_init__(self) -> None:
        limits_of(self.bucket_cap_mb)
        hook: Any = self.hook
        if hook is not None and not (isinstance(hook, Hook) and callable(hook.init) and callable(hook.apply)):
            raise HookError(
                f"a hook is a jdistgrad Hook(init, apply, name) of two functions, not {hook!r}. Hooks with settings "
                "are called first: hooks.powersgd(rank=2)."
            )
        if isinstance(self.sparse, str) or not all(isinstance(path, str) for path in self.sparse):
            raise TypeError(f"sparse must be a list of paths of leaves, as [\"['embedding']\"], not {self.sparse!r}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be a number of seconds above zero, not {self.timeout!r}")

    @functools.cached_property
    def settings(self) -> Settings:
        """The values that the ranks compare, by their names in messages; equal numbers have one spelling."""
        cap = self.bucket_cap_mb
        return (
            ("bucket_cap_mb", str(cap) if cap is None else repr(float(cap)).removesuffix(".0")),
            ("the hook", self.hook.name if self.hook else "none"),
            ("find_unused_parameters", str(self.find_unused_parameters)),
            ("check_finite", str(self.check_finite)),
            ("sparse", str(sorted(self.sparse))),
            ("check_parameters", str(self.check_parameters)),
        )

    def terms(self, tree: Any, static: tuple[str, ...] | None = None) -> Terms:
        """Describe a tree of gradients for the comparison of ranks. ``static``: the parts that the tree has lost."""
        parts = static_parts(flatten(tree)[1]) if static is None else static
        return Terms(tuple(describe(tree)), self.settings, parts)

    def require_averages(self, leaves: Sequence[Leaf]) -> None:
        """Raise LeafError for a leaf that has no average, or a sparse leaf that has no rows."""
        require_inexact(leaves, "DataParallel")
        for leaf in leaves:
            if self.travels_as_rows(leaf) and not leaf.shape:
                raise LeafError(
                    f"sparse: {leaf.path} is {leaf}, a scalar, which has no rows. Remove it from sparse=.",
                    path=leaf.path,
                )

    def require_sparse_paths(self, tree: Any) -> None:
        paths = [leaf.path for leaf in describe(tree)] if self.sparse else []
        for path in sorted(set(self.sparse).difference(paths)):
            raise LeafError(
                f"sparse: no parameter has the path {path}; paths are {', '.join(paths[:20])}"
                f"{', ...' if len(paths) > 20 else ''}",
                path=path,
            )

    def travels_as_rows(self, leaf: Leaf) -> bool:
        return leaf.sparse > 0 or leaf.path in self.sparse

    def plan(self, terms: Terms, order: Sequence[int] | None) -> BucketPlan:
        """Plan a tree's buckets. Ranks with equal terms and order get equal plans."""
        sparse = frozenset(k for k, leaf in enumerate(terms.leaves) if self.travels_as_rows(leaf))
        walk = range(len(terms.leaves))[::-1] if order is None else order  # a guess: the last gradients come first
        groups = plan_buckets(terms.leaves, limits_of(self.bucket_cap_mb), sparse=sparse, order=walk, large_alone=True)
        buckets = tuple(lay_out(terms.leaves, groups, sparse))
        bucket_of = {leaf: number for number, group in enumerate(groups) for leaf in group}
        return BucketPlan(terms, terms.digest(), tuple(walk), buckets, list(bucket_of), bucket_of)


@dataclasses.dataclass
class Handling:
    """The state of one step's reduction.

    Arguments:
      states: the hook's state for each bucket, replaced as buckets are reduced.
      act: REDUCE, which writes averages over the gradients, or AVERAGE, of gradients that the user still holds.
      joining: the kind of ``join`` block in which the step began.
    """

    step: int
    hook: Hook | None
    states: dict[int, Any]
    act: Act = Act.REDUCE
    joining: Joining = Joining.NONE
    started: float = dataclasses.field(default_factory=time.perf_counter)
    spans: list[BucketTimes] = dataclasses.field(default_factory=list)
    _before: dict[int, Any] | None = dataclasses.field(default=None, init=False)

    def remember(self) -> None:
        self._before = dict(self.states)

    def put_back(self) -> None:
        """Restore the states from before the step, which has failed on all ranks."""
        if self._before is not None:
            self.states.clear()
            self.states.update(self._before)
            self._before = None
