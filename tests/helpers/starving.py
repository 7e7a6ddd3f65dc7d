"""A process in which no more threads can be started."""

import contextlib
import threading

NO_MEMORY_HOLDS_IT = 1 << 46  # bytes, as the size of a thread's stack


def starve():
    threading.stack_size(NO_MEMORY_HOLDS_IT)


def feed():
    threading.stack_size(0)


@contextlib.contextmanager
def no_more_threads():
    starve()
    try:
        yield
    finally:
        feed()
