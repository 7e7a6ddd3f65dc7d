"""Threads: an unbounded pool of daemon threads, which serve calls; stopping threads; functions that C calls.

A call may wait for another that waits for a third that needs this worker: any fixed number of threads can deadlock.
``concurrent.futures.ThreadPoolExecutor`` bounds its threads, and joins them when the interpreter ends. Where the system
starts no more threads, tasks wait until one is free.
"""

import _thread
import atexit
import contextlib
import ctypes
import dis
import gc
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast

IDLE_LIMIT = 64
IDLE_SECONDS = 5.0  # after which a thread that has nothing to do ends
END_SECONDS = 0.2  # for all threads together: those that have nothing to do end at once
STOP_SLICE = 0.05
STOP_SECONDS = 5.0  # for all threads together: each goes on until its step in compiled code is done

POOL = "NPROC"  # the environment variable from which XLA takes the size of its pools; without it XLA counts cores
OWN_POOL = "JDISTGRAD_POOL"  # the same number, where the size is for the workers of one process, and not the user's

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("jdistgrad.threads")


def usable_cores() -> set[int]:
    """Return the cores that this process may use; all cores on systems without affinities, such as macOS."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def started(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def run_task(task: Callable[[], Any], whose: str) -> None:
    """Run a task; what it raises is logged."""
    try:
        task()
    except BaseException:
        if threading.current_thread() not in _stopped:
            log.exception("a task of %s failed outside of any call", whose)


def join_soon(threads: Iterable[threading.Thread], seconds: float = END_SECONDS) -> None:
    """Wait until threads that have nothing more to do have ended.

    JAX keeps arrays for each thread, the tokens of ordered effects. A thread that frees them while the interpreter ends
    aborts the process.
    """
    deadline = time.monotonic() + seconds
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


_stopped: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_looking = threading.Lock()


def stop(threads: Sequence[threading.Thread]) -> None:
    """Stop threads, each as soon as it runs Python code; wait for them, if it does not take long.

    A thread that has nothing to do is stopped when its next task comes. Of SystemExit alone, and of no subclass, Python
    says nothing where it ends a thread. Before Python 3.14, a thread that comes back from compiled code while the
    interpreter ends aborts the process.
    """
    deadline = time.monotonic() + STOP_SECONDS
    _stopped.update(threads)
    with _without_collections():  # what JAX does in these would ignore the exception, and print it
        while (running := [one for one in threads if one.is_alive()]) and time.monotonic() < deadline:
            for one in running:  # again, if the exception came in a destructor, which ignores it
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(one.ident or 0), ctypes.py_object(SystemExit))
            join_soon(running, STOP_SLICE)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    with _looking:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier.

    Python 3.11 holds a lock of the interpreter while it looks. If a garbage collection begins then, it may give way to
    a thread that wants this lock to start another thread, and both wait for ever (CPython's issue 106883).
    """
    with _without_collections() if sys.version_info < (3, 12) else contextlib.nullcontext():
        return sys._current_frames()


# The instruction with which each function begins, and looks for signals; where a generator goes on after another one
# that it has called, the same instruction does not. So it is in these versions.
RESUME, AT_START, AFTER_YIELD_FROM = dis.opmap["RESUME"], 0, 2
VERSIONS = {(3, 11), (3, 12), (3, 13)}
AGAIN_SECONDS = 1e-3

_called_by_c = set[CodeType]()


def called_by_c(function: F) -> F:
    """Let a function that C calls begin without a look for signals, where that is known to work; return the function.

    A handler would run outside of any ``try``, and ctypes ignores its exception and returns an undefined result. Our
    own handlers wait until the function has returned, but a notebook installs one for each cell that does not.
    """
    assert isinstance(function, FunctionType)
    if sys.version_info[:2] in VERSIONS:
        code = function.__code__
        start, quiet = bytes([RESUME, AT_START]), bytes([RESUME, AFTER_YIELD_FROM])
        place = next(k for k in range(0, len(code.co_code), 2) if code.co_code[k : k + 2] == start)
        function.__code__ = code.replace(co_code=code.co_code[:place] + quiet + code.co_code[place + 2 :])
    _called_by_c.add(function.__code__)
    return cast("F", function)


def is_called_by_c(frame: FrameType | None) -> bool:
    """Return whether a frame is in a function that C calls."""
    while frame is not None and frame.f_code not in _called_by_c:
        frame = frame.f_back
    return frame is not None


def signal_again(number: int) -> None:
    """Let the main thread handle a signal as soon as it is in no function that C calls."""

    def wait_and_signal() -> None:
        while is_called_by_c(frames().get(threading.main_thread().ident or 0)):
            time.sleep(AGAIN_SECONDS)
        _thread.interrupt_main(signal.Signals(number))

    started(wait_and_signal, "jdistgrad-signals")


class ThreadPool:
    """A pool that starts every task at once, on a thread of its own, as long as the system starts threads.

    Where it starts no more, tasks wait until a thread is free.

    Arguments:
      enter: runs first in every new thread.
    """

    def __init__(self, name: str, enter: Callable[[], None] = lambda: None):
        self._name, self._enter = name, enter
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._free = 0  # threads that have no task, less tasks that have no thread
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._count = itertools.count()
        self._starved = self._closed = False
        _pools.add(self)
        self._start(patience=None)  # stays: tasks for which no thread can be started do not wait for ever

    def run(self, task: Callable[[], Any]) -> None:
        """Run a task on a thread of the pool. Never raises: if no thread can be started, the task is queued."""
        with self._lock:
            self._free -= 1
            self._start_missing()
        self._tasks.put(task)

    def resume(self) -> None:
        """Start threads for the tasks that wait for one, as far as the system does. To be called now and then."""
        if self._free < 0:
            with self._lock:
                self._start_missing()

    def close(self) -> None:
        """End the threads: idle ones now, busy ones after their task. Wait for those that end soon."""
        join_soon(self.take_no_more())

    def take_no_more(self) -> list[threading.Thread]:
        """Let each thread end when it has nothing to do; return the threads."""
        with self._lock:
            self._closed = True
            while self._free > 0:
                self._free -= 1
                self._tasks.put(None)
            return self._threads

    def _start(self, patience: float | None = IDLE_SECONDS) -> None:
        """Start a thread. Raises RuntimeError if the system starts no more."""
        thread = started(self._serve, f"{self._name}-{next(self._count)}", patience)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        self._free += 1

    def _start_missing(self) -> None:
        try:
            while self._free < 0:
                self._start()
                self._starved = False
        except RuntimeError as error:
            if not self._starved:
                log.error(
                    "%s has %d threads and can start no more (%s; see ulimit -u, and the container's limit of "
                    "processes): tasks wait until a thread is free",
                    self._name,
                    sum(one.is_alive() for one in self._threads),
                    str(error),  # a record that is kept would keep the frames of a traceback
                )
            self._starved = True

    def _serve(self, patience: float | None) -> None:
        self._enter()
        while True:
            try:
                task = self._tasks.get(timeout=patience)
            except queue.Empty:
                with self._lock:
                    if self._free > 0:
                        self._free -= 1
                        return
                continue  # a task is on its way
            if task is None:
                return
            run_task(task, self._name)
            del task  # an idle thread must not keep a call's arrays alive
            with self._lock:
                surplus = self._closed or (patience is not None and self._free >= IDLE_LIMIT)
                if surplus and self._free >= 0:
                    return
                self._free += 1
                self._start_missing()


_pools: "weakref.WeakSet[ThreadPool]" = weakref.WeakSet()


@atexit.register
def _end_tasks() -> None:
    """Stop the tasks that still run when the program ends."""
    threads = [thread for pool in list(_pools) for thread in pool.take_no_more()]
    join_soon(threads)
    stop(threads)
