"""The settings that must be the same on every rank, and the plan that follows from them for a tree: pure functions."""

import dataclasses
import functools
import time
from collections.abc import Collection, Sequence
from typing import Any

from jdistgrad.collectives.leaves import Leaf, describe, flatten, require_inexact
from jdistgrad.collectives.roll_call import Act, Joining
from jdistgrad.collectives.static_parts import static_parts
from jdistgrad.data_parallel.agreement import Settings, Terms
from jdistgrad.data_parallel.buckets import Bucket, Cap, lay_out, limits_of, plan_buckets
from jdistgrad.data_parallel.hooks import Hook
from jdistgrad.data_parallel.statistics import Span
from jdistgrad.errors import HookError, LeafError


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets that the ranks have agreed on for one tree of gradients.

    ``bucketed``: the leaves of all buckets, one bucket after the other. ``bucket_of``: the bucket of each leaf.
    """

    terms: Terms
    digest: int
    order: tuple[int, ...]
    buckets: tuple[Bucket, ...]

    bucketed: list[int]
    bucket_of: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of reduction: arguments of ``DataParallel``, which describes them."""

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
        """The values that the ranks compare, by the names that messages use: equal numbers are spelled alike."""
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
        """Describe a tree of gradients as the ranks compare it. ``static``: its static parts, if it has lost them."""
        parts = static_parts(flatten(tree)[1]) if static is None else static
        return Terms(tuple(describe(tree)), self.settings, parts)

    def require_averages(self, leaves: Sequence[Leaf]) -> None:
        """Raise LeafError for a leaf that has no average, or a sparse leaf that has no rows."""
        require_inexact(leaves, "DataParallel")
        for leaf in leaves:
            if self.travels_as_rows(leaf) and not leaf.shape:
                raise LeafError(
                    f"sparse: {leaf.path} is {leaf}, a number by itself: it has no rows. Leave it out.", path=leaf.path
                )

    def require_sparse_paths(self, tree: Any) -> None:
        """Raise LeafError for a path in ``sparse`` that no leaf of the parameters has."""
        paths = [leaf.path for leaf in describe(tree)] if self.sparse else []
        for path in sorted(set(self.sparse).difference(paths)):
            raise LeafError(
                f"sparse: the parameters have no leaf {path}, expected one of {', '.join(paths[:20])}"
                f"{', ...' if len(paths) > 20 else ''}",
                path=path,
            )

    def travels_as_rows(self, leaf: Leaf) -> bool:
        return leaf.sparse > 0 or leaf.path in self.sparse

    def plan(self, terms: Terms, order: Sequence[int] | None) -> BucketPlan:
        """Plan a tree's buckets: the same plan on every rank that has the same terms and order."""
        sparse = frozenset(k for k, leaf in enumerate(terms.leaves) if self.travels_as_rows(leaf))
        walk = range(len(terms.leaves))[::-1] if order is None else order  # a guess: the last gradients come first
        groups = plan_buckets(terms.leaves, limits_of(self.bucket_cap_mb), sparse=sparse, order=walk, large_alone=True)
        buckets = tuple(lay_out(terms.leaves, groups, sparse))
        bucket_of = {leaf: number for number, group in enumerate(groups) for leaf in group}
        return BucketPlan(terms, terms.digest(), tuple(walk), buckets, list(bucket_of), bucket_of)


@dataclasses.dataclass
class Handling:
    """The way in which one step's gradients are reduced.

    Arguments:
      states: the hook's state for each bucket, replaced as buckets are reduced.
      act: the action that is announced to the other ranks: REDUCE, whose averages are written over the gradients, or
        AVERAGE, of gradients that a user still holds.
      joining: the kind of ``join`` block in which the step began.
    """

    step: int
    hook: Hook | None
    states: dict[int, Any]
    act: Act = Act.REDUCE
    joining: Joining = Joining.NONE
    started: float = dataclasses.field(default_factory=time.perf_counter)
    spans: list[Span] = dataclasses.field(default_factory=list)
    _before: dict[int, Any] | None = dataclasses.field(default=None, init=False)

    def remember(self) -> None:
        """Remember the states, before the first bucket is reduced."""
        self._before = dict(self.states)

    def put_back(self) -> None:
        """Put back the states of before the step, which has failed: no rank has an average of it."""
        if self._before is not None:
            self.states.clear()
            self.states.update(self._before)
            self._before = None
