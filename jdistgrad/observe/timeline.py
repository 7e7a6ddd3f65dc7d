"""The timeline: what the workers of this process did, and when, as one file."""

import concurrent.futures
import os
import pathlib
import socket
import time
from typing import Any

from jdistgrad import events
from jdistgrad.errors import TimelineError
from jdistgrad.events import Event
from jdistgrad.observe import chrome
from jdistgrad.wire import launcher_env

WAITERS = 8


def timeline(path: str | os.PathLike[str] | None = None) -> "Timeline":
    """Record what happens in a block: calls, what was served, pullbacks, pieces of ``jit``, buckets, on each worker.

    Records all workers of this process. Under mpirun every rank records itself, and its rank is put into the file's
    name: ``trace.rank2.json``; ``jdistgrad trace`` makes one file of them. ``jdistgrad run --timeline trace.json`` does
    both for a program as it stands. Nothing is measured outside of such a block.

    Arguments:
      path: the file to write at the end of the block, for Perfetto (ui.perfetto.dev); default none.

    Returns:
      What is recorded: ``.events``, ``.save(path)``, ``.plot()``.

    Raises:
      TimelineError: something is being recorded already.

    Example:
      >>> with jd.local_workers(3), jd.timeline() as recorded:
      ...     answer = jd.rpc_sync("worker2", jnp.add, args=(1, 2))
      >>> sorted((event.kind, event.worker) for event in recorded.events)
      [('call', 'worker0'), ('serve', 'worker2')]
    """
    return Timeline(path)


class Timeline:
    """What ``timeline`` returns."""

    def __init__(self, path: str | os.PathLike[str] | None):
        self._path = path
        self.events: list[Event] = []
        self._epoch = time.time() - time.monotonic()

    def __enter__(self) -> "Timeline":
        if events.sink is not None:
            raise TimelineError("a timeline is being recorded in this process already; end that block first")
        self._waiters = concurrent.futures.ThreadPoolExecutor(WAITERS, "jdistgrad-timeline")
        events.sink = self._record
        return self

    def __exit__(self, *exception: Any) -> None:
        events.sink = None
        self._waiters.shutdown(wait=True)
        if self._path is not None:
            self.save(in_this_rank(self._path))

    def trace(self) -> chrome.Trace:
        """What was recorded so far, in Chrome's trace format."""
        return chrome.to_trace(list(self.events), host=socket.gethostname(), epoch=self._epoch)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded, for Perfetto."""
        chrome.write(self.trace(), path)

    def plot(self, axes: Any = None) -> Any:
        """Draw what was recorded with matplotlib; returns the axes."""
        from jdistgrad.observe.plot import plot

        return plot(self.trace(), axes)

    def _record(self, event: Event) -> None:
        if event.arrays is None:
            self.events.append(event)
        else:
            self._waiters.submit(self._record_when_ready, event)

    def _record_when_ready(self, event: Event) -> None:
        """JAX answers before it has computed: a piece ends when its results are there."""
        import jax

        end = event.end
        try:
            jax.block_until_ready(event.arrays)
            end = time.monotonic()
        except RuntimeError:  # donated meanwhile, or it failed: whoever needs it is told
            pass
        self.events.append(event._replace(end=end, arrays=None))


def in_this_rank(path: str | os.PathLike[str]) -> pathlib.Path:
    """A file's name on this rank of a job: each has its own."""
    named = pathlib.Path(path)
    return named.with_suffix(f".rank{launcher_env.rank()}{named.suffix}") if launcher_env.launched() else named
