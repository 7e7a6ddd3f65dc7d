"""Uneven inputs: a rank that has run out does what the others do, with zeros, until all have."""

from collections.abc import Callable
from typing import Any

from jdistgrad.errors import CollectiveError


class Join:
    """A block of steps of which this rank may take fewer than the others; see ``DataParallel.join``."""

    def __init__(self, shadow: Callable[[], int], broadcast: Callable[[Any, int], Any]):
        self._shadow, self._broadcast = shadow, broadcast
        self.finished = False

    def finish(self, tree: Any) -> Any:
        """Say that this rank has run out, shadow the others, and take over the model of the last that was active.

        Every rank must call it once, inside the ``with`` block, after its last step.

        Arguments:
          tree: this rank's parameters, and what else belongs to them (optimizer state, batch statistics).

        Returns:
          The tree of the last rank to run out.
        """
        return self._broadcast(tree, self._end())

    def _end(self) -> int:
        if self.finished:
            raise CollectiveError("join: finish was called twice in one block; call it once, after the last step.")
        self.finished = True
        return self._shadow()

    def leave(self) -> None:
        """The block has ended without ``finish``: shadow, and broadcast nothing."""
        if not self.finished:
            self._end()
