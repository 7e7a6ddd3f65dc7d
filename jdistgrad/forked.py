"""The end of a process that a task of a thread has forked: the thread's other work is the parent's."""

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_forked(error: BaseException | None) -> NoReturn:
    """End this process as Python ends a program that ended with this exception, or without one."""
    with contextlib.suppress(Exception):  # the stream is closed
        _tell(error)
    leave(status_of(error.code) if isinstance(error, SystemExit) else int(error is not None))


def _tell(error: BaseException | None) -> None:
    if not isinstance(error, SystemExit | None):
        traceback.print_exception(error)
    elif error is not None and not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)


def status_of(code: object) -> int:
    """Return the exit status for an argument of ``sys.exit``."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)


def leave(status: int) -> NoReturn:
    """End this process without its last exit handlers, which would wait for its parent."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or None
            stream.flush()
    os._exit(status)
