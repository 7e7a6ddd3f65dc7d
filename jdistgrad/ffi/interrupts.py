"""Ctrl-C while the main thread waits in compiled code.

Python runs its signal handlers between two bytecodes of the main thread, which runs none while a compiled program waits
for another worker. The byte that C writes on a signal (``signal.set_wakeup_fd``) wakes a thread of our own. If the main
thread stands still, our thread ends the calls under way with an error: the program fails, and Python goes on by raising
KeyboardInterrupt.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from jdistgrad.threads import frames

STANDSTILL_SECONDS = 0.1

_lock = threading.Lock()
_installed = False


def watch_for_interrupts(cancel: Callable[[], None]) -> None:
    """Call ``cancel`` whenever Ctrl-C was pressed and the main thread stands still. Starts once for each process."""
    global _installed
    with _lock:
        if _installed or threading.current_thread() is not threading.main_thread():
            return
        _installed = True
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, before, cancel), name="jdistgrad-interrupts", daemon=True).start()


def _watch(read: int, before: int, cancel: Callable[[], None]) -> None:
    while numbers := os.read(read, 64):
        if before >= 0:  # other code has set a descriptor too: pass the signals on
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        if signal.SIGINT in numbers and _stands_still():
            cancel()


def _stands_still() -> bool:
    """Return whether the main thread is where it was a moment ago."""
    place = _place()
    time.sleep(STANDSTILL_SECONDS)
    return place == _place()


def _place() -> tuple[int, int] | None:
    frame: FrameType | None = frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
