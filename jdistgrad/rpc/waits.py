"""What `jdistgrad stacks` shows of this process: all stacks, and what its workers wait for (JDISTGRAD_DEBUG=1).

Each process has a file in its job's folder. A thread writes there when the file ``asked`` changes; SIGUSR1 has
faulthandler write the stacks also where Python does not run.
"""

import contextlib
import faulthandler
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
import weakref
from typing import IO, TYPE_CHECKING

from jdistgrad import errors
from jdistgrad.config import settings
from jdistgrad.rpc.functions import describe
from jdistgrad.rpc.watchdog import where
from jdistgrad.threads import started
from jdistgrad.wire import launcher_env
from jdistgrad.wire.message import spell

if TYPE_CHECKING:
    from jdistgrad.rpc.worker import Worker

ASKED = "asked"
END = "end of rank"  # of what a process writes
LOOK_SECONDS = 0.1

workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()
_starting = threading.Lock()
_started = False


def root() -> pathlib.Path:
    """Return the folder that has a folder for each job of this user on this machine."""
    default = pathlib.Path(tempfile.gettempdir()) / f"jdistgrad-debug-{os.getuid()}"
    return pathlib.Path(settings.debug_dir or default).absolute()


def start_if_asked() -> None:
    """Start the thread if JDISTGRAD_DEBUG asks for it. Raises WorldError if the files cannot be written."""
    global _started
    with _starting:
        if not settings.debug or _started:
            return
        job = launcher_env.job() or f"launcher-{os.getppid()}"
        folder = root() / re.sub(r"[^\w.@-]", "_", job if launcher_env.launched() else f"process-{os.getpid()}")
        path = folder / f"rank{launcher_env.rank()}-{os.uname().nodename}-{os.getpid()}.txt"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of an earlier process of this number
            file = path.open(
                "a", encoding="utf-8"
            )  # each request empties it; two may answer: this thread, and a signal
        except OSError as error:
            raise errors.WorldError(
                f"init: JDISTGRAD_DEBUG=1, but {folder} cannot be written: {error}. Choose another folder: "
                "JDISTGRAD_DEBUG_DIR."
            ) from error
        handled = signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=handled)
        started(_serve, "jdistgrad-stacks", file, folder / ASKED)
        _started = True


def _serve(file: IO[str], asked: pathlib.Path) -> None:
    seen = 0
    while True:
        time.sleep(LOOK_SECONDS)
        with contextlib.suppress(OSError):  # no request yet
            now = asked.stat().st_mtime_ns
            if now != seen:
                seen = now
                for worker in sorted((one for one in workers if not one.closed), key=lambda one: one.rank):
                    file.write("\n  ".join((f"\n{worker.info} at {where(worker.home)}:", *waits_of(worker))))
                file.write("\n")
                file.flush()
                faulthandler.dump_traceback(file)
                file.write(f"{END}{launcher_env.rank()}\n")
                file.flush()


def waits_of(worker: "Worker") -> list[str]:
    """Return a line for each thing that a worker waits for or does, without locks: one that hangs may hold them."""
    now, names, engaged = time.monotonic(), worker.directory.workers, list(worker.watchdog.all.values())
    meetings = [one for one in engaged if one.entry.by_calls]
    found = [
        f"{now - one.since:.1f} s in {one.entry.what}, with {', '.join(str(names[k]) for k in sorted(one.peers))}"
        for one in engaged
    ]
    found += [
        f"{now - one.since:.1f} s waiting for {one.peer} to answer {describe(one.function)} (call {spell(one.id)})"
        for one in worker.calls.pending.now()
        if not any(one.thread == meeting.thread and one.since >= meeting.since for meeting in meetings)
    ]
    found += [
        f"{now - one.since:.1f} s serving {one} for {names[one.peer]}, at {where(one.thread)}"
        for one in list(worker.running.values())
    ]
    found += [f"{now - worker.closing.since:.1f} s in shutdown"] if worker.closing.wanted else []
    return found or ["waits for nothing"]
