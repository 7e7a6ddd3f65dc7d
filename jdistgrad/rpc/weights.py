"""Weights of references: shares of which the owner knows when all have come back.

Weights are exact dyadic fractions, so that each can be split. The owner's value is free when all weight has returned:
there are no acknowledgements, no tree of copies and no races (Bevan 1987; Watson and Watson 1987). The classic
weakness, a weight of one that cannot be halved, is solved by finer units instead of a message: ``units / 2**scale``,
and 32 more bits whenever the last unit is split. The coarsest units are given away first: else the weight of a
reference that goes to and fro would get 32 bits longer each time.
"""

import dataclasses

FINER = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A share of a reference: ``units / 2**scale``."""

    units: int
    scale: int = 0

    def __add__(self, other: "Weight") -> "Weight":
        scale = max(self.scale, other.scale)
        return Weight((self.units << (scale - self.scale)) + (other.units << (scale - other.scale)), scale)

    def __sub__(self, other: "Weight") -> "Weight":
        return self + Weight(-other.units, other.scale)

    def __bool__(self) -> bool:
        return self.units != 0

    def split(self) -> tuple["Weight", "Weight"]:
        """Return the weight to keep and the weight to give away; their sum is this weight, and neither is zero."""
        held = self if self.units > 1 else Weight(self.units << FINER, self.scale + FINER)
        coarser = FINER * min(((held.units - 1).bit_length() - 1) // FINER, held.scale // FINER)
        given = Weight(1, held.scale - coarser)
        return held - given, given


NOTHING, WHOLE = Weight(0), Weight(1)

Gift = tuple[int, int, Weight]  # the id of a reference, its owner, and the weight
