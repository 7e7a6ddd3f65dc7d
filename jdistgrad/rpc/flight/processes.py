"""Processes of this machine, as Linux describes them: when they started, who started them, what they run.

A process is known by its id and its start, because ids are used again.
"""

import os
import pathlib
from collections.abc import Callable

STATE, PARENT, START = 0, 1, 19  # fields of /proc/PID/stat behind the command's name


def start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since the machine did; None if it has ended, or this is not Linux."""
    return _number(pid, START)


def parent_of(pid: int) -> int | None:
    return _number(pid, PARENT)


def is_stopped(pid: int) -> bool:
    """Return whether a process stands still because of a signal (SIGSTOP) or a debugger."""
    fields = _fields(pid)
    return fields is not None and fields[STATE] in ("T", "t")


def is_running(pid: int, start: int | None) -> bool:
    """Return whether a process that started then is still there."""
    if start is not None:
        return start_of(pid) == start
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal, as far as the system tells: else the signal may end it."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt:")]
    return any(mask >> (number - 1) & 1 for mask in masks)


def descends_from(pid: int, ancestor: int, parent: Callable[[int], int | None] = parent_of) -> bool:
    """Return whether a process is another one, or was started by it, directly or not."""
    one: int | None = pid
    while one and one != ancestor:
        one = parent(one)
    return one == ancestor


def _number(pid: int, field: int) -> int | None:
    fields = _fields(pid)
    return None if fields is None else int(fields[field])


def _fields(pid: int) -> list[str] | None:
    """Return what Linux says of a process behind its name; None if it has ended."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return None if fields[STATE] in ("Z", "X") else fields


def uptime_ticks() -> float:
    """Return the time since the machine started, in the ticks of ``start_of``."""
    seconds = float(pathlib.Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return seconds * os.sysconf("SC_CLK_TCK")
