"""When each bucket may go: a pure state machine.

Gradients come in any order; buckets go strictly in theirs. Going by arrival would pair different buckets on different
ranks: sums that are silently wrong where their sizes are equal.
"""

from collections.abc import Sequence

from jdistgrad.data_parallel.layout import Bucket
from jdistgrad.errors import LeafError


class Launching:
    """One step: which leaves have come, which buckets have gone."""

    def __init__(self, buckets: Sequence[Bucket]):
        self._slots = {slot.index: (bucket.index, slot) for bucket in buckets for slot in bucket.slots}
        self._waiting = [len(bucket.slots) for bucket in buckets]
        self._ready: set[int] = set()
        self._next = 0

    def ready(self, leaf: int) -> range:
        """A gradient has come; the buckets that go now, in order. Raises LeafError when it had come before."""
        bucket, slot = self._slots[leaf]
        if leaf in self._ready:
            raise LeafError(
                f"the gradient of {slot.path} (leaf {leaf}, bucket {bucket}) was marked ready twice in one step. Each "
                "gradient is reduced once: sum the parts first.",
                path=slot.path,
            )
        self._ready.add(leaf)
        self._waiting[bucket] -= 1
        start = self._next
        while self._next < len(self._waiting) and self._waiting[self._next] == 0:
            self._next += 1
        return range(start, self._next)

    def missing(self) -> list[str]:
        """The paths of the gradients that have not come."""
        return [slot.path for leaf, (_, slot) in sorted(self._slots.items()) if leaf not in self._ready]
