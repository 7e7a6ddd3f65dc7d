"""A program that becomes another program, which ends when the process that started it ends or is killed.

It is run by its file, in a Python without any packages: the request to the kernel (prctl) must be made between fork and
exec, where a process that has JAX's threads cannot run code of its own.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """Return a command line for a program that ends when this process does, or the thread that starts the program."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(starter: str, *command: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(starter):
        sys.exit("the process that started this job has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
