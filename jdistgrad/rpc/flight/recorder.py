"""The recorder of this process: its last events, its workers, and the file that says what they wait for.

A thread of its own writes the file when it is asked: by ``jdistgrad stacks``, by another rank that has found an error,
or by SIGUSR1. A thread that finds an error writes the file itself, and asks the other ranks. On SIGUSR1 faulthandler
first writes all stacks: it needs neither the main thread nor Python's lock, so a rank that stands still in C shows its
place.
"""

import atexit
import collections
import contextlib
import faulthandler
import logging
import os
import pathlib
import signal
import socket
import sys
import threading
import time
import weakref
from typing import Any

from jdistgrad import errors, events
from jdistgrad.config import settings
from jdistgrad.rpc.flight import folder as files, processes, snapshots
from jdistgrad.rpc.worker import Worker
from jdistgrad.threads import started
from jdistgrad.wire import launcher_env
from jdistgrad.wire.interrupts import handle_signals

EVENTS = 1000
LOOK_SECONDS = 0.1  # how often the thread looks whether it is asked
AGAIN_SECONDS = 1.0  # between two files that errors of this process write
OTHERS_SECONDS = 0.5  # for the other ranks' files, before this rank ends the job

log = logging.getLogger("jdistgrad.rpc")

Ring = collections.deque[events.Told]


class Recorder:
    """The recorder of this process, from the first ``init`` to the end of the process."""

    def __init__(self, folder: pathlib.Path, label: str):
        self.folder, self._label = folder, label
        self._events: Ring = collections.deque(maxlen=EVENTS)
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._writing = threading.Lock()
        self._written = -AGAIN_SECONDS
        self._found_error = False

    def start(self) -> None:
        self._stacks = files.entered(self.folder, self._label)
        if not settings.debug_dir:  # else it may be another machine's, whose processes are not known here
            with contextlib.suppress(OSError):
                files.remove_old(self.folder.parent, time.time())
        handle_signal(self._stacks)
        self._announced = self._process()
        files.write(self._path(files.PROCESS), self._announced)  # not before: the signal would end the process
        events.listen(self.record)
        started(self._serve, "jdistgrad-recorder")
        atexit.register(self._end, os.getpid())

    def add(self, worker: Worker) -> None:
        self._workers.add(worker)
        worker.error_suffix = self.record_error

    def record(self, told: events.Told) -> None:
        if isinstance(told, events.Event) and told.arrays is not None:
            told = told._replace(arrays=None)
        self._events.append(told)

    def snapshot(self, cause: str) -> dict[str, Any]:
        """Return what this process does now."""
        now = time.monotonic()
        workers = [worker for worker in list(self._workers) if not worker.closed]
        return {
            **self._process(),
            "cause": cause,
            "time": time.time(),
            "workers": [snapshots.of_worker(worker, now) for worker in sorted(workers, key=lambda one: one.rank)],
            "threads": snapshots.of_threads(),
            "events": [snapshots.of_event(events.made(told), now) for told in self._events.copy()],
        }

    def write(self, cause: str) -> None:
        """Write the snapshot. An error of this is logged: it must not hide the error that is being reported."""
        try:
            with self._writing:
                files.write(self._path(files.WAITS), self.snapshot(cause))
        except Exception:
            log.exception("rank %d cannot write what it waits for to %s", launcher_env.rank(), self.folder)

    def record_error(self, cause: str, *, wait: bool = False) -> str:
        """Write what all ranks wait for, because of an error; return the line about that for the error's text.

        Arguments:
          wait: whether to wait for the other ranks' files: this rank is about to end the job.
        """
        now = time.monotonic()
        if now - self._written > AGAIN_SECONDS:
            self._written, self._found_error = now, True
            self.write(cause)
            with contextlib.suppress(OSError):
                asked = files.ask(self.folder, files.TROUBLE)
                if wait:
                    self._wait_for_others(asked)
        return (
            f"\nwho waited for whom: jdistgrad stacks {self.folder} (this process wrote {self._path(files.WAITS).name})"
        )

    def _wait_for_others(self, asked: int) -> None:
        deadline = time.monotonic() + OTHERS_SECONDS
        others = [path for path in self.folder.glob(f"*{files.PROCESS}") if path != self._path(files.PROCESS)]
        waits = [path.with_name(path.name.replace(files.PROCESS, files.WAITS)) for path in others]
        while time.monotonic() < deadline and any(files.changed(path) < asked for path in waits):
            time.sleep(0.02)

    def _serve(self) -> None:
        """Write the snapshot whenever it is asked for. What this process wrote at an error of its own tells more."""
        watched = self.folder / files.ASKED, self._path(files.STACKS), self.folder / files.TROUBLE
        seen = [files.changed(path) for path in watched]
        while True:
            time.sleep(LOOK_SECONDS)
            self._announce_handler()
            now = [files.changed(path) for path in watched]
            asked, signalled, error = [new and new != old for new, old in zip(now, seen, strict=True)]
            seen = now
            if asked or signalled:
                self.write("asked by jdistgrad stacks" if asked else "asked by SIGUSR1")
            elif error and time.monotonic() - self._written > AGAIN_SECONDS:
                self._found_error = True
                self.write("asked by another rank, which found an error")

    def _announce_handler(self) -> None:
        """Tell `jdistgrad stacks` if the program has set a handler of SIGUSR1, or taken it back."""
        if has_own_handler() != self._announced[files.HANDLER]:
            self._announced = self._process()
            with contextlib.suppress(OSError):
                files.write(self._path(files.PROCESS), self._announced)

    def _end(self, pid: int) -> None:
        if os.getpid() == pid and not self._found_error:
            files.remove(self.folder, self._label)

    def _path(self, kind: str) -> pathlib.Path:
        return self.folder / f"{self._label}{kind}"

    def _process(self) -> dict[str, Any]:
        return {
            "label": self._label,
            "rank": launcher_env.rank() if launcher_env.launched() else None,
            "pid": os.getpid(),
            "start": processes.start_of(os.getpid()),
            "host": socket.gethostname(),
            "command": sys.argv,
            files.HANDLER: has_own_handler(),
        }


def handle_signal(stacks: Any) -> None:
    """Let SIGUSR1 write all stacks, and then do what it did before, except end the process.

    A handler of the user's is called if it was there before ``init``. Python lets only the main thread set one; later
    handlers replace this one, and ``jdistgrad stacks`` then finds out all but the stacks of a rank that stands still.
    """
    handle_signals()  # now: done later, it would take the place of faulthandler's
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=has_own_handler())


def has_own_handler() -> bool:
    """Return whether the program handles SIGUSR1. Python does not count the handler of faulthandler."""
    return signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)


_recorder: Recorder | None = None
_starting = threading.Lock()


def start_if_asked() -> None:
    """Start the recorder of this process if JDISTGRAD_DEBUG asks for one, and there is none yet.

    Raises:
      WorldError: the files cannot be written.
    """
    global _recorder
    if not settings.debug:
        return
    with _starting:
        if _recorder is None:
            folder, label = files.of_this_process()
            recorder = Recorder(folder, label)
            try:
                recorder.start()
            except OSError as error:
                raise errors.WorldError(
                    f"init: JDISTGRAD_DEBUG=1, but {folder} cannot be written: {error}. Choose another folder: "
                    "JDISTGRAD_DEBUG_DIR."
                ) from error
            _recorder = recorder


def watch(worker: Worker) -> None:
    """Let the recorder, if there is one, include this worker."""
    if _recorder is not None:
        _recorder.add(worker)


def record_error(cause: str, *, wait: bool = False) -> str:
    """Write what all ranks wait for if there is a recorder; return the line about that for an error's text."""
    return "" if _recorder is None else _recorder.record_error(cause, wait=wait)


def current() -> Recorder | None:
    """Return the recorder of this process, if there is one."""
    return _recorder


def _in_child() -> None:
    """Leave a forked process without the recorder, whose thread and files are the parent's."""
    global _recorder
    if _recorder is not None:
        _recorder = None
        faulthandler.unregister(signal.SIGUSR1)


os.register_at_fork(after_in_child=_in_child)
