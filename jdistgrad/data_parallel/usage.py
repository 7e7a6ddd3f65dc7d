"""Which parameters losses depended on: a pure record, from one average to the next."""

from collections.abc import Sequence
from typing import Any


class Usage:
    """What steps that were not averaged (``no_sync``) used, by the structure of their gradients."""

    def __init__(self) -> None:
        self._pending: dict[Any, list[bool]] = {}

    def note(self, structure: Any, used: Sequence[bool]) -> None:
        """One more step, of which the gradients stay this rank's own."""
        before = self._pending.get(structure, [False] * len(used))
        self._pending[structure] = [a or b for a, b in zip(before, used, strict=True)]

    def take(self, structure: Any, used: Sequence[bool] | None = None) -> list[bool]:
        """What is used by the gradients now averaged: those of this step, if there is one, and of those before it.

        Where nothing is known of them, each counts as used.
        """
        if used is not None:
            self.note(structure, used)
        return self._pending.pop(structure, None) or [True] * structure.num_leaves
