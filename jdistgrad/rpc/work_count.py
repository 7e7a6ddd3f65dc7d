"""Counts of the messages that carry work, by which a world decides when it may close."""

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jdistgrad.wire.message import WORK, Kind


class WorkCount:
    """The numbers of messages with work sent to each worker, received from each, and being served. For any thread.

    They are counted by worker, so that those of lost workers can be left out.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._lock, self._rank = threading.RLock(), rank  # garbage may be collected in ``counts``, and its __del__ send
        self._sent, self._received, self._serving = [0] * size, [0] * size, [0] * size

    def sending(self, kind: Kind, peer: int) -> None:
        if kind in WORK:
            with self._lock:
                self._sent[peer] += 1

    def not_sent(self, kind: Kind, peer: int) -> None:
        if kind in WORK:
            with self._lock:
                self._sent[peer] -= 1

    def received(self, peer: int) -> None:
        with self._lock:
            self._received[peer] += 1

    def serving(self, peer: int) -> None:
        with self._lock:
            self._received[peer] += 1
            self._serving[peer] += 1

    def served(self, peer: int) -> None:
        with self._lock:
            self._serving[peer] -= 1

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Keep this worker busy during a block."""
        self._started()
        try:
            yield
        finally:
            self.served(self._rank)

    def counted(self, task: Callable[[], Any]) -> Callable[[], None]:
        """Return a task, for any thread, that keeps this worker busy from now until it has run."""
        self._started()
        return functools.partial(self._finish, task)

    def _started(self) -> None:
        with self._lock:
            self._serving[self._rank] += 1

    def _finish(self, task: Callable[[], Any]) -> None:
        try:
            task()
        finally:
            self.served(self._rank)

    def serves(self, peer: int) -> bool:
        """Return whether a call of this worker has arrived that has not been answered."""
        return self._serving[peer] > 0

    @property
    def serves_any(self) -> bool:
        """Return whether this worker does any work."""
        return any(self._serving)

    def counts(self, lost: Collection[int] = ()) -> tuple[int, int, int]:
        """Return the numbers sent to and received from workers that are not lost, and being served, at one moment."""
        with self._lock:
            sent, received = (
                sum(n for rank, n in enumerate(of) if rank not in lost) for of in (self._sent, self._received)
            )
            return sent, received, sum(self._serving)
