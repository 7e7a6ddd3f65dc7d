"""Becomes another program, one that ends when the process that started it does: also when that is killed.

Run by its file, in a Python without any packages: what the kernel is told must be told between fork and exec, and a
process with JAX's threads in it cannot run code of its own there.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(starter: str, *command: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(starter):
        sys.exit("the process that started this job has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
