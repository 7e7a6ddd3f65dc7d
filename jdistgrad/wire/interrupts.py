"""Ctrl-C at a safe place.

Python raises KeyboardInterrupt between any two steps of the main thread. Between finding a message and taking it, or
between the parts of one that is being sent, that would lose it. There it is put off to the end of the block.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class put_off_interrupt:  # noqa: N801 used like a function
    """A block that Ctrl-C does not break. ``seen`` says that it was pressed; it takes effect when the block ends.

    Only the main thread is ever interrupted: elsewhere this does nothing.
    """

    __slots__ = ("_previous", "seen")

    def __init__(self) -> None:
        self.seen = False
        self._previous: Any = None

    def __enter__(self) -> "put_off_interrupt":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self.seen:
                self._previous(signal.SIGINT, None)
