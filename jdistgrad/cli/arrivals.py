"""What a launcher learns from the notes of a job's ranks: who came to `init`, who came to the end.

Before MPI has started, ranks cannot tell each other that they have called `init`, and wait for each other in C.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jdistgrad.rpc.flight import processes
from jdistgrad.wire import launcher_env

LOOK_SECONDS = 0.5


class Call(NamedTuple):
    """A rank's first call of `init`: in which process, when, and when it gives up. Times are ``time.monotonic``'s."""

    process: int
    called: float
    gives_up: float


def calls(folder: str) -> dict[int, Call]:
    """Return the ranks that have called `init`."""
    read = {rank: text.split() for rank, text in launcher_env.notes(folder, launcher_env.CALLED).items()}
    return {rank: Call(int(text[0]), *map(float, text[1:])) for rank, text in read.items() if len(text) == 3}


def missing(n: int, called: Mapping[int, Call]) -> list[int]:
    """Return the ranks that had not called `init` when the first of the others gave up.

    A rank that was stopped is woken when its job ends, and may call `init` then.
    """
    end = min((call.gives_up for call in called.values()), default=0.0)
    return [rank for rank in range(n) if rank not in called or called[rank].called >= end]


class Arrivals:
    """Watches the ranks of a job until all have met."""

    def __init__(self, n: int, folder: str):
        self._n, self._folder = n, folder
        self._stopped: list[int] = []
        self._gone: list[int] = []
        self._over = threading.Event()

    @contextlib.contextmanager
    def watched(self, job: subprocess.Popen[Any]) -> Iterator[None]:
        """Watch while a block waits for the job's process. End a job of which a rank can never come."""
        thread = threading.Thread(target=self._watch, args=(job,), name="jdistgrad-arrivals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self, job: subprocess.Popen[Any]) -> None:
        """Note which ranks are stopped while MPI starts, until the first of them gives up and the job ends.

        MPI does not end a job that survives when a rank ends that never called `init`; the others wait for it in C.
        """
        while not self._over.wait(LOOK_SECONDS):
            called, joined = calls(self._folder), launcher_env.notes(self._folder, launcher_env.JOINED)
            if len(joined) == self._n or any(call.gives_up <= time.monotonic() for call in called.values()):
                return
            self._gone = sorted(launcher_env.notes(self._folder, launcher_env.GONE)) if called else []
            if self._gone:
                job.terminate()
                return
            here = {rank: call for rank, call in called.items() if rank not in joined}
            self._stopped = sorted(rank for rank, call in here.items() if processes.is_stopped(call.process))

    def report(self) -> None:
        """Say for which ranks of a job that failed the others may have waited, if any called `init`."""
        called = calls(self._folder)
        late = missing(self._n, called)
        if self._gone:
            say(f"ranks {self._gone} of {self._n} ended before they called init, where the others waited for them")
        elif called and late:
            say(f"ranks {late} of {self._n} had not called init when the job ended")
        if self._stopped:
            say(f"ranks {self._stopped} of {self._n} stood still (SIGSTOP) in init while the others waited for them")


def has_failed(n: int, folder: str) -> bool:
    """Return whether a job that survives has failed, as mpirun's exit status does not tell; say so if all have died."""
    if launcher_env.notes(folder, launcher_env.FAILED):
        return True
    none = bool(launcher_env.notes(folder, launcher_env.JOINED)) and not launcher_env.notes(folder, launcher_env.ENDED)
    if none:
        say(f"none of the {n} ranks came to its end")
    return none


def say(text: str) -> None:
    print(f"jdistgrad: {text}", file=sys.stderr, flush=True)
