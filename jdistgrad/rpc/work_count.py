"""Counts of the messages that carry work: what the end of a world is decided by."""

import threading

from jdistgrad.wire.message import WORK, Kind


class WorkCount:
    """How much work was sent, received, and is being served. Safe from any thread."""

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
        """Something that is no message keeps this worker busy until it is ``served``."""
        with self._lock:
            self._serving += 1

    def served(self) -> None:
        with self._lock:
            self._serving -= 1

    def counts(self) -> tuple[int, int, int]:
        """Sent, received, being served: of one moment."""
        with self._lock:
            return self._sent, self._received, self._serving
