"""The process that prints a job's error output: without MPI's boxes, and with the ranks' equal lines folded.

It is a process of its own because mpirun and the ranks must be able to write as long as they live, whatever signals
ended the rest of the job. Each rank writes to a pipe of its own, mpirun to this process's input. Should this process
end before the job, `jdistgrad run` itself goes on with the copying: a rank whose pipe nobody reads would stand still.
"""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO

from jdistgrad.cli.boxes import BoxFilter
from jdistgrad.cli.folding import HOLD_SECONDS, Folding

MOST_PIPES = 64  # ranks: each takes two descriptors here, and of more ranks the equal lines are not folded
LEFT_SECONDS = 5.0  # for the rest of a job's output, should a process outlast the job

RANK = "${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}"  # in sh

# Gives a rank its own pipe for errors, where mpirun would mix all ranks' lines. $0 is the folder of the pipes.
TO_ITS_PIPE = f'rank={RANK}; if [ -p "$0/$rank" ]; then exec "$@" 2>"$0/$rank"; fi; exec "$@"'


def main(*pipes: int) -> None:
    """Print what comes from the pipes of all ranks, in their order, and from the standard input, until all end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    copy({0: None, **{pipe: rank for rank, pipe in enumerate(pipes)}}, 1)


def copy(sources: Mapping[int, int | None], target: int) -> None:
    """Copy output to a descriptor until all sources have ended.

    Arguments:
      sources: descriptors, with the rank that writes to each; None for mpirun.
    """
    folding, printer = Folding(len(sources) - 1), Printer(target)
    filters = {source: BoxFilter() for source in sources}
    waiting = select.poll()
    for source in sources:
        waiting.register(source, select.POLLIN)
    left = set(sources)
    while left:
        for source, _ in waiting.poll(pause(folding.due(), time.monotonic())):
            data = os.read(source, 1 << 16)
            folding.take(sources[source], filters[source](data) if data else filters[source].end(), time.monotonic())
            if not data:
                waiting.unregister(source)
                left.remove(source)
            elif filters[source].named:
                for other in filters.values():
                    other.named = True
            printer.write(folding.ready(time.monotonic()))
        printer.write(folding.ready(time.monotonic()))
    printer.write(folding.end())


def pause(due: float | None, now: float) -> int | None:
    """Return for how many milliseconds nothing has to be printed; None: until more comes."""
    return None if due is None else max(0, round(1000 * (due + HOLD_SECONDS - now)) + 1)


class Printer:
    """A descriptor to print to.

    Once nobody reads it (the terminal has gone, or a program such as ``head``), all is thrown away: the ranks go on.
    """

    def __init__(self, target: int):
        self._target, self._broken = target, False

    def write(self, data: bytes) -> None:
        while data and not self._broken:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # a terminal that another program has told not to block
                wait_for_room(self._target)
            except OSError:
                self._broken = True


def wait_for_room(target: int) -> None:
    room = select.poll()
    room.register(target, select.POLLOUT)
    room.poll()


@contextlib.contextmanager
def error_output(n: int) -> Iterator[tuple[IO[bytes], list[str]]]:
    """Yield the stream for mpirun's errors, and the command that goes before a rank's own: it takes the rank's pipe."""
    sys.stderr.flush()
    ranks = range(n) if 1 < n <= MOST_PIPES else range(0)
    with tempfile.TemporaryDirectory(prefix="jdistgrad-") as folder, contextlib.ExitStack() as until_job_ends:
        pipes = [os.pipe(), *(make_pipe(pathlib.Path(folder) / str(rank)) for rank in ranks)]
        readers = [reader for reader, _ in pipes]
        errors, *writers = [until_job_ends.enter_context(open(writer, "wb", 0)) for _, writer in pipes]
        copying = threading.Thread(target=attend, args=(start(readers), readers), daemon=True)
        copying.start()
        try:
            yield errors, ["sh", "-c", TO_ITS_PIPE, folder] if writers else []
        finally:
            until_job_ends.close()  # a rank's pipe does not end before the job
            copying.join(LEFT_SECONDS)


def make_pipe(path: pathlib.Path) -> tuple[int, int]:
    """Make a pipe that has a name; return descriptors for reading and for writing."""
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for a writer
    return reader, os.open(path, os.O_WRONLY)


def start(readers: list[int]) -> subprocess.Popen[bytes]:
    """Start the copying process, in a Python without any packages: it must be there before the ranks are."""
    package = str(pathlib.Path(__file__).parents[2])
    errors, *pipes = readers
    code = f"import sys; sys.path.insert(0, {package!r}); from jdistgrad.cli import copier; copier.main(*{pipes})"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=errors, stdout=2, pass_fds=pipes, env=plain()
    )


def attend(process: subprocess.Popen[bytes], readers: list[int]) -> None:
    """Wait until the copying process has ended, and copy what it has left: nothing, unless it failed or was killed."""
    process.wait()
    copy({reader: rank for rank, reader in zip([None, *range(len(readers) - 1)], readers, strict=True)}, 2)
    for reader in readers:
        os.close(reader)


def plain() -> dict[str, str]:
    """Return this environment without what lets `import jdistgrad` load JAX."""
    from jdistgrad.wire import launcher_env

    return launcher_env.outside_the_job()
