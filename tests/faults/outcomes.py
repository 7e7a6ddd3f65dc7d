"""Outcomes of injected faults, and their counts."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator

# What may happen. Named: whoever the fault concerns got the clear error that is promised. Survived: the fault changed
# nothing, as promised.
NAMED, SURVIVED, HUNG, WRONG = "named", "survived", "hung", "wrong"
GOOD = NAMED, SURVIVED

PATIENCE = "JDISTGRAD_FAULT_PATIENCE"  # by how much promised times are stretched, on machines that are busy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one fault.

    Attributes:
      fault: the fault, in words that repeat it.
      text: what was found, if that was not what is promised.
      seconds: how long the fault took to be noticed, if that was measured.
    """

    kind: str
    fault: str
    text: str = ""
    seconds: float | None = None

    @property
    def good(self) -> bool:
        return self.kind in GOOD


def patience() -> float:
    return float(os.environ.get(PATIENCE, "1"))


def counted(outcomes: Iterable[Outcome]) -> dict[str, int]:
    counts = collections.Counter(one.kind for one in outcomes)
    return {"injected": counts.total(), **{kind: counts[kind] for kind in (NAMED, SURVIVED, HUNG, WRONG)}}


def times(outcomes: Iterable[Outcome]) -> str:
    """Return the median and the longest time in which faults were noticed."""
    found = sorted(one.seconds for one in outcomes if one.seconds is not None)
    return f"{found[len(found) // 2]:.1f} s, at most {found[-1]:.1f} s" if found else ""


def table(found: dict[str, list[Outcome]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: a line for each row of faults."""
    heads = ["fault", *counted([]), "noticed after"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for name, outcomes in found.items():
        counts = [str(count) for count in counted(outcomes).values()]
        yield f"| {' | '.join([name, *counts, times(outcomes)])} |"
