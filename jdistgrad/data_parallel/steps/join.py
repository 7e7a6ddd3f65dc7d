"""Uneven inputs: a rank that has run out of inputs shadows the others with zeros, until all ranks have run out."""

from collections.abc import Callable
from typing import Any

from jdistgrad.errors import CollectiveError


class Join:
    """A block of steps of which this rank may take fewer than the others; see ``DataParallel.join``."""

    def __init__(self, shadow: Callable[[], int], broadcast: Callable[[Any, int], Any]):
        self._shadow, self._broadcast = shadow, broadcast
        self.finished = False

    def finish(self, tree: Any) -> Any:
        """Declare that this rank has run out, shadow the others, and return the model of the last active rank.

        Every rank must call it once, inside the ``with`` block, after its last step.

        Arguments:
          tree: this rank's parameters and the rest of its model (optimizer state, batch statistics).

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
        """End a block without ``finish``: shadow the others, and broadcast nothing."""
        if not self.finished:
            self._end()
