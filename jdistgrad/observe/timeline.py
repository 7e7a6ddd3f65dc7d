"""The timeline: the recorded events of all workers of this process."""

import concurrent.futures
import contextlib
import os
import pathlib
import socket
import sys
import time
from typing import Any

from jdistgrad import events
from jdistgrad.errors import TimelineError
from jdistgrad.events import Event
from jdistgrad.observe import chrome
from jdistgrad.wire import launcher_env

WAITERS = 8


def timeline(path: str | os.PathLike[str] | None = None) -> "Timeline":
    """Record the events of each worker in a block: calls, served calls, pullbacks, pieces of ``jit``, buckets.

    Records all workers of this process. Under mpirun every rank records itself, and its rank is put into the file's
    name: ``trace.rank2.json``; ``jdistgrad trace`` makes one file of them. ``jdistgrad run --timeline trace.json`` does
    both for a program as it stands. Nothing is measured outside such a block.

    Arguments:
      path: the file to write at the end of the block, for Perfetto (ui.perfetto.dev); default none. A line on the error
        stream says what has been written, and where.

    Returns:
      The timeline, with ``.events``, ``.save(path)`` and ``.plot()``.

    Raises:
      TimelineError: this process is recording a timeline already, or the file cannot be written.

    Example:
      >>> with jd.local_workers(3), jd.timeline() as recorded:
      ...     answer = jd.rpc_sync("worker2", jnp.add, args=(1, 2))
      >>> sorted((event.kind, event.worker) for event in recorded.events)
      [('call', 'worker0'), ('serve', 'worker2')]
    """
    return Timeline(path)


class Timeline:
    """A recording of the workers of this process, which ``timeline`` returns."""

    def __init__(self, path: str | os.PathLike[str] | None):
        self._path = path
        self.events: list[Event] = []
        self._epoch = time.time() - time.monotonic()

    def __enter__(self) -> "Timeline":
        if events.sink is not None:
            raise TimelineError(
                "a timeline is being recorded in this process already, of all its workers: by another block, on any of "
                "them, or by `jdistgrad run --timeline`. Record one at a time."
            )
        if self._path is not None:
            chrome.check_writable(in_this_rank(self._path))
        self._waiters = concurrent.futures.ThreadPoolExecutor(WAITERS, "jdistgrad-timeline")
        events.sink = self._record
        return self

    def __exit__(self, *exception: Any) -> None:
        events.sink = None
        self._waiters.shutdown(wait=True)
        if self._path is not None:
            path = in_this_rank(self._path)
            self.save(path)
            print(chrome.summary(self.trace(), path), file=sys.stderr)

    def trace(self) -> chrome.TraceFile:
        """Return the events recorded so far, in Chrome's trace format."""
        return chrome.to_trace(list(self.events), host=socket.gethostname(), epoch=self._epoch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recorded events to a file for Perfetto."""
        chrome.write(self.trace(), path)

    def plot(self, axes: Any = None) -> Any:
        """Draw the recorded events with matplotlib, and return the axes."""
        return chrome.plot(self.trace(), axes)

    def _record(self, told: events.Told) -> None:
        event = events.made(told)
        if event.arrays is None:
            self.events.append(event)
        else:
            with contextlib.suppress(RuntimeError):  # the block has ended meanwhile
                self._waiters.submit(self._record_when_ready, event)

    def _record_when_ready(self, event: Event) -> None:
        """Record an event once its arrays are ready: JAX returns earlier, but a piece ends with its results."""
        import jax

        end = event.end
        try:
            jax.block_until_ready(event.arrays)
            end = time.monotonic()
        except RuntimeError:  # an array was donated meanwhile, or its computation failed: its users get that error
            pass
        self.events.append(event._replace(end=end, arrays=None))


def in_this_rank(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the path with this rank in its file name if this process is a rank of a job, else the path itself."""
    named = pathlib.Path(path)
    return named.with_suffix(f".rank{launcher_env.rank()}{named.suffix}") if launcher_env.launched() else named
