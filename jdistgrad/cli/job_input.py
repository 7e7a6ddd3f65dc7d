"""The standard input of a job: what `jdistgrad run` reads from, unless it is a terminal, its first rank reads itself.

Open MPI 5 forwards input by way of mpirun, but not its end, so that a rank that reads all of the input waits for ever;
and of more than 64 KiB it repeats parts.
"""

import os
import stat
from typing import NamedTuple

from jdistgrad.cli.copier import RANK

# Lets the first rank read from the path $0. mpirun gives the others no input.
FROM_PATH = f'rank={RANK}; if [ "$rank" = 0 ]; then exec "$@" <"$0"; fi; exec "$@"'


class JobInput(NamedTuple):
    """How a job gets its input.

    Arguments:
      forwarded: whether mpirun reads it, and passes it on.
      command: what goes before a rank's own command.
    """

    forwarded: bool
    command: list[str]


def job_input(descriptor: int = 0) -> JobInput:
    """Return how a job gets the input that this process has at a descriptor."""
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        found = os.fstat(descriptor)
    except OSError:  # it was closed
        return JobInput(forwarded=False, command=[])
    if os.path.samestat(found, os.stat(os.devnull)):
        return JobInput(forwarded=False, command=[])
    has_path = os.path.exists(path)  # not on all systems
    is_pipe = has_path and os.readlink(path).startswith("pipe:")  # to open one with a name might wait
    if is_pipe or (has_path and stat.S_ISREG(found.st_mode)):
        return JobInput(forwarded=False, command=["sh", "-c", FROM_PATH, path])
    return JobInput(forwarded=True, command=[])
