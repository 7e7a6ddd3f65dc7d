"""The lines of the user's program that threads are in: neither this package nor installed code."""

import pathlib
import sys
from types import FrameType

from jdistgrad.threads import frames

PACKAGE = str(pathlib.Path(__file__).parents[1])


def is_installed(file: str, module: str = "") -> bool:
    """Return whether code belongs to this package, to another installed one or to Python."""
    library = "site-packages" in file or file.startswith((sys.base_prefix, PACKAGE, "<frozen"))
    return library or module.partition(".")[0] == "jdistgrad"


def place(file: str, line: int | None, function: str) -> str:
    return f"{pathlib.Path(file).name}:{line}, in {function}"


def where(thread: int) -> str:
    """Return the innermost line of the user's program that a thread is in; without one, the innermost line."""
    innermost = frames().get(thread)
    found = in_program(innermost) or innermost
    return "its end" if found is None else place_of(found)


def in_program(frame: FrameType | None) -> FrameType | None:
    """Return the innermost of a thread's frames that is the user's, or None."""
    while frame is not None and is_installed(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return frame


def calls_package(thread: int) -> bool:
    """Return whether a thread is in a call of this package that the user's program has made, and not in other code."""
    frame = frames().get(thread)
    while frame is not None and is_installed(frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def place_of(frame: FrameType) -> str:
    return place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
