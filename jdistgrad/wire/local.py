"""The transport between threads of one process, which passes objects without copying or pickling."""

import concurrent.futures
import logging
import math
import threading
import time
from typing import Any

from jdistgrad import errors
from jdistgrad.threads import started
from jdistgrad.wire.interrupts import SteadyCondition, has_come, wait_in_slices
from jdistgrad.wire.message import Message
from jdistgrad.wire.transport import Awaited, Futures, Receiver, Transport

TICK_SECONDS = 0.005
JOIN_SECONDS = 60.0  # for the last worker to open, when all have met

log = logging.getLogger("jdistgrad.wire")


class Hub:
    """The worlds of some threads, and the first failure. The k-th ``init`` of every thread joins the k-th world."""

    def __init__(self, size: int):
        self.size = size
        self.failure: BaseException | None = None
        self._worlds: list[LocalWorld] = []
        self._joined = [0] * size
        self._lock = threading.Lock()

    def next_world(self, rank: int) -> "LocalWorld":
        with self._lock:
            turn = self._joined[rank]
            self._joined[rank] += 1
            if turn == len(self._worlds):
                self._worlds.append(LocalWorld(self))
            return self._worlds[turn]

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            worlds = list(self._worlds)
        for world in worlds:
            world.fail(error)


class LocalWorld:
    """A local world from its first ``init`` to its last ``shutdown``, with a thread that calls ``tick``."""

    def __init__(self, hub: Hub):
        self.hub, self.size = hub, hub.size
        self._hellos: dict[int, Any] = {}
        self.receivers: dict[int, Receiver | None] = {}  # by rank; None: it has left
        self._changed = SteadyCondition()

    def gather(self, rank: int, hello: Any, timeout: float) -> list[Any]:
        """Return the hellos of all workers, by rank. Raises WorldError with the missing ranks."""
        self._arrive(self._hellos, rank, hello, timeout)
        return [self._hellos[rank] for rank in range(self.size)]

    def join(self, rank: int, receiver: Receiver) -> None:
        self._arrive(self.receivers, rank, receiver, JOIN_SECONDS)
        if rank == 0:
            started(self._tick, "jdistgrad-clock")

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._changed.notify_all()
        for receiver in self._present().values():
            receiver.fail(error)

    def _present(self) -> dict[int, Receiver]:
        return {rank: receiver for rank, receiver in self.receivers.copy().items() if receiver is not None}

    def _arrive(self, arrivals: dict[int, Any], rank: int, value: Any, timeout: float) -> None:
        limit = min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            arrivals[rank] = value
            self._changed.notify_all()
            complete = self._changed.wait_for(lambda: len(arrivals) == self.size or self.hub.failure, limit)
        self.hub.check()
        if not complete:
            missing = sorted(set(range(self.size)) - set(arrivals))
            raise errors.WorldError(
                f"init: ranks {missing} of a local world of {self.size} did not call init within {timeout:g} s. "
                "Every worker's main must call init.",
                missing=missing,
            )

    def _tick(self) -> None:
        while present := self._present():
            now = time.monotonic()
            for rank, receiver in present.items():
                try:
                    receiver.tick(now)
                except Exception:  # the other workers need this thread too
                    log.exception("housekeeping of the local worker of rank %d failed", rank)
            time.sleep(TICK_SECONDS)


class LocalTransport(Transport):
    """A worker's end of a local world."""

    hands_over = True

    def __init__(self, world: LocalWorld, rank: int):
        self.world, self.rank, self.size = world, rank, world.size

    def start(self, receiver: Receiver) -> None:
        self.world.join(self.rank, receiver)

    def send(self, peer: int, message: Message) -> None:
        receiver = self.world.receivers[peer]
        if receiver is None:
            self.world.hub.check()
            raise errors.WorkerLostError(f"the worker of rank {peer} has left this local world", worker=peer)
        task = receiver.receive(message)
        if task is not None:
            receiver.run(task)

    def wait_for(self, futures: Futures, timeout: float | None) -> None:
        if len(futures) > 1:  # a single one waits by itself
            super().wait_for(futures, timeout)

    def wait(self, target: Awaited, deadline: float = math.inf) -> None:
        if not target.done:
            futures, seconds, first = target.futures(), deadline - time.monotonic(), concurrent.futures.FIRST_COMPLETED
            wait_in_slices(lambda longest: concurrent.futures.wait(futures, longest, first).done or has_come(), seconds)

    def close(self, *, graceful: bool) -> None:
        self.world.receivers[self.rank] = None
