"""The choice of a bucket size by measurement: a state machine that says which size to use next."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jdistgrad.data_parallel.reducing.settings import BucketPlan, Rules

CAPS: tuple[float | None, ...] = (None, 1.0, 4.0, 25.0, 100.0)  # in MiB; None: 25, and 1 for the first bucket
ROUNDS = 6  # each round tries every size in one step; the first round compiles, so its times do not count


class Tuning:
    """Trials of several bucket sizes, in turn. Every rank must go through the same steps.

    Only steps with the first tree of gradients count. Sizes that lead to the same buckets are tried once.
    """

    def __init__(self, rules: Rules):
        self._rules = rules
        self._first: BucketPlan | None = None
        self._times: dict[float | None, list[float | None]] = {}
        self._steps = 0
        self.trials: tuple[
            tuple[float | None, float], ...
        ] = ()  # sizes, and the seconds of a step, once all have been tried

    @property
    def has_begun(self) -> bool:
        """Return whether a step has been noted: only then do the ranks know that all of them tune."""
        return self._first is not None

    @property
    def cap(self) -> float | None:
        """Return the size to use in the next step."""
        if self.trials:
            return min(self.trials, key=lambda trial: trial[1])[0]
        caps = list(self._times) or [CAPS[0]]
        return caps[self._steps % len(caps)]

    @property
    def medians(self) -> list[float] | None:
        """Return this rank's median time for each size, once all sizes have been tried and nothing is decided yet."""
        if self.trials or self._steps < ROUNDS * max(1, len(self._times)):
            return None
        known = [[one for one in times[1:] if one is not None] for times in self._times.values()]
        return [statistics.median(times) if times else math.inf for times in known]

    def note(self, plan: BucketPlan, seconds: float | None) -> None:
        """Note the time of a step with the present size; None for a step that did not end here. All ranks count it."""
        if self._first is None:
            self._first = plan
            self._times = {cap: [] for cap in self._different(plan)}
        if not self.trials and plan.terms.leaves == self._first.terms.leaves:
            self._times[self.cap].append(seconds)
            self._steps += 1

    def decide(self, slowest: Sequence[float]) -> None:
        """Choose the size by the slowest rank's median for each."""
        self.trials = tuple(zip(self._times, slowest, strict=True))

    def _different(self, plan: BucketPlan) -> list[float | None]:
        found: dict[Any, float | None] = {}
        for cap in CAPS:
            rules = dataclasses.replace(self._rules, bucket_cap_mb=cap)
            groups = tuple(bucket.slots for bucket in rules.plan(plan.terms, plan.order).buckets)
            found.setdefault(groups, cap)
        return list(found.values())
