"""The process that prints a job's error output: without MPI's boxes, and with the ranks' equal lines folded.

It is a process of its own because mpirun and the ranks must be able to write as long as they live, whatever signals
ended the rest of the job. Each rank writes to a pipe of its own, mpirun to this process's input.
"""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO

from jdistgrad.cli.boxes import BoxFilter
from jdistgrad.cli.folding import HOLD_SECONDS, Folding

LEFT_SECONDS = 5.0  # for the rest of a job's output, should a process outlast the job

# Gives a rank its own pipe for errors, where mpirun would mix all ranks' lines. $0 is the folder of the pipes.
TO_ITS_PIPE = (
    'rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}; if [ -p "$0/$rank" ]; then exec "$@" 2>"$0/$rank"; fi; '
    'exec "$@"'
)


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
    folding = Folding(len(sources) - 1)
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
        write(target, folding.ready(time.monotonic()))
    write(target, folding.end())


def pause(due: float | None, now: float) -> int | None:
    """Return for how many milliseconds nothing has to be printed; None: until more comes."""
    return None if due is None else max(0, round(1000 * (due + HOLD_SECONDS - now)) + 1)


def write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


@contextlib.contextmanager
def error_output(n: int) -> Iterator[tuple[IO[bytes], list[str]]]:
    """Yield the stream for mpirun's errors, and the command that goes before a rank's own: it takes the rank's pipe."""
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="jdistgrad-") as folder, contextlib.ExitStack() as until_job_ends:
        pipes = [make_pipe(pathlib.Path(folder) / str(rank)) for rank in range(n)] if n > 1 else []
        process = start([reader for reader, _ in pipes])
        for reader, writer in pipes:
            os.close(reader)
            until_job_ends.callback(os.close, writer)  # a rank's pipe does not end before the job
        assert process.stdin is not None
        try:
            yield process.stdin, ["sh", "-c", TO_ITS_PIPE, folder] if pipes else []
        finally:
            until_job_ends.close()
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LEFT_SECONDS)


def make_pipe(path: pathlib.Path) -> tuple[int, int]:
    """Make a pipe that has a name; return descriptors for reading and for writing."""
    os.mkfifo(path, 0o600)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for a writer
    return reader, os.open(path, os.O_WRONLY)


def start(pipes: list[int]) -> subprocess.Popen[bytes]:
    """Start the copying process, in a Python without any packages: it must be there before the ranks are."""
    package = str(pathlib.Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {package!r}); from jdistgrad.cli import copier; copier.main(*{pipes})"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=2, pass_fds=pipes, env=plain()
    )


def plain() -> dict[str, str]:
    """Return this environment without what lets `import jdistgrad` load JAX."""
    from jdistgrad.wire import launcher_env

    return launcher_env.outside_the_job()
