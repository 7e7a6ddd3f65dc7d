"""Counts of the messages that carry work, by which a world decides when it may close."""

import threading

from jdistgrad.wire.message import WORK, Kind


class WorkCount:
    """The numbers of messages with work sent, received and being served. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = self._received = self._serving = 0

    def sending(self, kind: Kind) -> None:
        if kind in WORK:
            with self._lock:
                self._sent += 1

    def not_sent(self, kind: Kind) -> None:
        if kind in WORK:
            with self._lock:
                self._sent -= 1

    def received(self) -> None:
        with self._lock:
            self._received += 1

    def serving(self) -> None:
        with self._lock:
            self._received += 1
            self._serving += 1

    def started(self) -> None:
        """Count work that is no call as being served, until ``served``; it keeps this worker busy."""
        with self._lock:
            self._serving += 1

    def served(self) -> None:
        with self._lock:
            self._serving -= 1

    def counts(self) -> tuple[int, int, int]:
        """Return the numbers sent, received and being served, all at one moment."""
        with self._lock:
            return self._sent, self._received, self._serving
