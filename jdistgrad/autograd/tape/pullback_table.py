"""Recorded pullbacks by message. A pull may come before its call has been served; the pull waits."""

import functools
from typing import Any

from jdistgrad.errors import ContextError
from jdistgrad.wire.ids import spell
from jdistgrad.wire.interrupts import SteadyCondition, wait_in_slices

_PULLED = object()  # replaces a recording after its last pull


class PullbackTable:
    """The recordings of one worker in one context."""

    def __init__(self) -> None:
        self._found: dict[int, Any] = {}
        self._closed = False
        self._error: BaseException | None = None
        self._changed = SteadyCondition()

    def __len__(self) -> int:
        with self._changed:
            return sum(one is not _PULLED for one in self._found.values())

    def keep(self, message: int, recording: Any) -> None:
        with self._changed:
            self._found[message] = recording
            self._changed.notify_all()

    def wait_for(self, message: int) -> None:
        """Wait until a message has been recorded, or the context has been closed. Raises if it never will be."""
        with self._changed:
            wait_in_slices(functools.partial(self._changed.wait_for, lambda: self._is_settled(message)))
            if message not in self._found and self._error is not None:
                raise self._error

    def _is_settled(self, message: int) -> bool:
        return message in self._found or self._closed or self._error is not None

    def find(self, message: int, *, last: bool) -> Any:
        """Wait for the recording of a message and return it. ``last``: it will not be requested again.

        Raises:
          ContextError: the context closed first, or the recording is requested after its last pull.
        """
        with self._changed:
            self.wait_for(message)
            found = self._found.get(message)
            if last and found is not None:
                self._found[message] = _PULLED
        if found is None:
            raise ContextError(f"the context was closed before message {spell(message)} was recorded")
        if found is _PULLED:
            raise ContextError(
                f"what was recorded for message {spell(message)} has been pulled back for the last time: differentiate "
                "the whole computation again."
            )
        return found

    def give_up(self, error: BaseException) -> None:
        """Fail the waits for what is not recorded yet, now and later."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Release all recordings and fail the pulls that wait for others."""
        with self._changed:
            self._closed = True
            self._found.clear()
            self._changed.notify_all()
