"""Ctrl-C at a safe place.

Python raises KeyboardInterrupt between any two steps of the main thread. Between finding a message and taking it, or
between the parts of one that is being sent, that would lose it. There it is put off to the end of the block.

Entering a block must cost next to nothing: the handler that puts off stays installed around the one it found, and is
put back when somebody (a notebook does it for every cell) has installed another.
"""

import os
import signal
import threading

# The one in signal spends 1.5 us on turning the answer into an enum.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_main = threading.main_thread().ident
_blocks: list["put_off_interrupt"] = []  # the main thread's, innermost last


class Handler:
    """Around the handler that was there before: each has its own, so that programs may save and restore them."""

    __slots__ = ("previous",)

    def __init__(self, previous: Callable[[int, FrameType | None], Any]):
        self.previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _blocks:
            _blocks[0].seen = _blocks[-1].seen = True
        else:
            self.previous(number, frame)


def _install() -> Handler | None:
    """The handler in place; None where the program ignores interrupts, or lets them end it."""
    current = getsignal(signal.SIGINT)
    if isinstance(current, Handler):
        return current
    if not callable(current):
        return None
    handler = Handler(current)
    signal.signal(signal.SIGINT, handler)
    return handler


def _in_child() -> None:
    """Of a fork: the thread that made it is the main one, and in no block of another."""
    global _main
    if threading.get_ident() != _main:
        _main = threading.get_ident()
        _blocks.clear()


os.register_at_fork(after_in_child=_in_child)


class put_off_interrupt:  # noqa: N801 used like a function
    """A block that Ctrl-C does not break. ``seen`` says that it was pressed; it takes effect when the block ends.

    Inside another block, it takes effect when that one ends. Only the main thread is ever interrupted: elsewhere this
    does nothing.
    """

    __slots__ = ("_handler", "seen")

    def __init__(self) -> None:
        self.seen = False
        self._handler: Handler | None = None

    def __enter__(self) -> "put_off_interrupt":
        if threading.get_ident() == _main:
            self._handler = _install()
            if self._handler is not None:
                _blocks.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _blocks.pop()
            if self.seen and not _blocks:
                self._handler.previous(signal.SIGINT, None)
