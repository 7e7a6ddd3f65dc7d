"""Running programs over the devices of all ranks; the job is aborted if one does not end.

Such a program cannot be cancelled: a rank that hangs in one keeps all others waiting there, silently.
"""

import atexit
import collections
import contextlib
import dataclasses
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jdistgrad.rpc.watchdog import WatchedBlock
from jdistgrad.threads import join_soon, started

LOOK_SECONDS = 0.25
END_SECONDS = 1e-3
GRACE_SECONDS = 3.0  # every rank prints what it knows before the first aborts the job


@dataclasses.dataclass(eq=False)
class Launch:
    """A program that this rank has begun.

    ``inputs``: weak references to arrays that this rank may still be computing, which does not count as waiting.
    ``done``: an array that is ready when the program has ended.
    """

    what: str
    block: WatchedBlock
    timeout: float
    since: float = dataclasses.field(default_factory=time.monotonic)
    inputs: Sequence[Callable[[], Any]] = ()
    done: Any = None

    @property
    def has_ended(self) -> bool:
        return self.done is not None and bool(self.done.is_ready())

    def overdue(self) -> bool:
        now = time.monotonic()
        self.inputs = [one for one in self.inputs if _is_awaited(one())]
        if self.inputs:
            self.since = now
        return now - self.since > self.timeout


def _is_awaited(array: Any) -> bool:
    try:
        return array is not None and not array.is_ready()
    except RuntimeError:  # deleted: donated to a program
        return False


class Launches:
    """The running programs of this process, in the order of their dispatch, in which they also end."""

    def __init__(self) -> None:
        self._launches: collections.deque[Launch] = collections.deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, what: str, block: WatchedBlock, inputs: Iterable[Any], timeout: float) -> Launch:
        """Register a program before its dispatch. Raises if a rank is lost already."""
        self._drop_ended()
        block.__enter__()
        limit = timeout if block.has_others else math.inf
        awaited = [weakref.ref(one) for one in inputs if hasattr(one, "is_ready")]  # random keys have no such method
        launch = Launch(what, block, limit, inputs=awaited)
        with self._lock:
            self._launches.append(launch)
            if self._thread is None:
                self._thread = started(self._watch, "jdistgrad-devices")
                atexit.register(self.end)
        return launch

    def end(self) -> None:
        """Wait for the running programs, and end the thread: inside JAX it would abort the exiting process."""
        assert self._thread is not None
        while any(one.done is not None and not one.has_ended for one in self._launches.copy()):
            time.sleep(END_SECONDS)
        self._over.set()
        join_soon([self._thread])

    def give_up(self, launch: Launch) -> None:
        """Unregister a program that was not dispatched."""
        with self._lock:
            self._launches.remove(launch)
        launch.block.__exit__()

    def _drop_ended(self) -> None:
        while True:
            with self._lock:
                if not self._launches or not self._launches[0].has_ended:
                    return
                launch = self._launches.popleft()
                if self._launches:  # the program before has ended
                    self._launches[0].since = time.monotonic()
            launch.block.__exit__()
            try:
                launch.done.block_until_ready()
            except jax.errors.JaxRuntimeError as error:  # the other ranks wait for ever
                if launch.block.has_others:
                    end_job(launch, f"{launch.what}, a program over the devices of all ranks, failed: {error}")

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self._drop_ended()
            first = next(iter(self._launches.copy()), None)
            if first is None or not first.overdue():
                continue
            who = first.block.worker.info
            text = f"{who} has waited {first.timeout:g} s for {first.what}, a program over all devices. "
            with contextlib.suppress(Exception):  # nobody reads or answers
                print(f"jdistgrad: {text}{first.block.unfinished()}", file=sys.stderr, flush=True)
            time.sleep(GRACE_SECONDS)
            if not first.has_ended:
                end_job(first, f"{first.what} did not end within {first.timeout:g} s")
            first.timeout = math.inf


def end_job(launch: Launch, cause: str) -> None:
    worker = launch.block.worker
    worker.end_job(f"{worker.info}: {cause}")


launches = Launches()
