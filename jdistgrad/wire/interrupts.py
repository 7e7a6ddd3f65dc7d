"""Ctrl-C at a safe place.

Python raises KeyboardInterrupt between any two steps of the main thread. Between finding a message and taking it, or
between the parts of one that is being sent, that would lose it. There it is put off to the end of the block.

Entering a block must cost next to nothing: the handler that puts off stays installed around the one it found, and is
put back when somebody (a notebook does it for every cell) has installed another.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_previous: Any = None
_blocks: list["put_off_interrupt"] = []  # the main thread's, innermost last


def _handle(number: int, frame: FrameType | None) -> None:
    if _blocks:
        _blocks[0].seen = _blocks[-1].seen = True
    else:
        _previous(number, frame)


def _install() -> bool:
    """Whether interrupts can be put off: not where the program ignores them, or lets them end it."""
    global _previous
    current = signal.getsignal(signal.SIGINT)
    if current is not _handle:
        if not callable(current):
            return False
        _previous = current
        signal.signal(signal.SIGINT, _handle)
    return True


class put_off_interrupt:  # noqa: N801 used like a function
    """A block that Ctrl-C does not break. ``seen`` says that it was pressed; it takes effect when the block ends.

    Inside another block, it takes effect when that one ends. Only the main thread is ever interrupted: elsewhere this
    does nothing.
    """

    __slots__ = ("_active", "seen")

    def __init__(self) -> None:
        self.seen = self._active = False

    def __enter__(self) -> "put_off_interrupt":
        if threading.get_ident() == threading.main_thread().ident and _install():
            _blocks.append(self)
            self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            _blocks.pop()
            if self.seen and not _blocks:
                _previous(signal.SIGINT, None)
