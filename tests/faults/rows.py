"""The rows of the table of faults: names, the functions that inject them, and how many are injected."""

import dataclasses
from collections.abc import Callable, Iterator

from faults import many, program, ranks, restarts, steps, steps_survived, survivors
from faults.outcomes import Outcome


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: a fault of some kind.

    Attributes:
      inject: injects so many faults, drawn from a seed, and yields what happened.
      full: how many `make faults` injects; ``short``: how many the tests inject (0: tests/jobs has some).
    """

    name: str
    inject: Callable[[int, int], Iterator[Outcome]]
    full: int
    short: int


def played(module: str, *, processes: int = 3, limit: float = 60.0) -> Callable[[int, int], Iterator[Outcome]]:
    """Return a function that injects the faults of a module, on so many ranks."""
    return lambda count, seed: program.run(processes, module, count, seed, limit=limit)


ROWS = {
    row.name: row
    for row in (
        Row("killed", ranks.killed, 1000, 1),
        Row("survived kills", survivors.killed, 1000, 1),
        Row("survived kills in data-parallel steps", steps_survived.killed, 500, 1),
        Row("standing still", ranks.standing_still, 60, 1),
        Row("ending", ranks.ending, 100, 1),
        Row("failing functions", played("faults.calls"), 1000, 30),
        Row("Ctrl-C", played("faults.interrupts", processes=1), 1000, 30),
        Row("failing pipelines", played("faults.pipelines"), 500, 5),
        Row("differing trees", played("faults.trees"), 1000, 15),
        Row("killed and started again", restarts.resumed, 20, 0),
        Row("differing steps", steps.differing, 100, 1),
        Row("limits", played("faults.limits", limit=600.0), 5, 4),
        Row("mixed load", played("faults.endurance"), 1800, 1),
        Row("many ranks", many.together, 4, 1),
    )
}
