"""The environment variables by which a launcher describes the job to its processes. Reading them starts no MPI."""

import contextlib
import os
import pathlib

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")

# The variables by which a process finds its job. The settings of MPI (OMPI_MCA_...) are not among them.
OF_A_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
OF_MPI = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")


# Where ranks leave notes for `jdistgrad run`, and what the notes are called: before MPI starts, ranks cannot tell each
# other that they have called ``init``; and mpirun's exit status does not tell whether any rank of a job that survives
# came to its end, nor whether one failed when the others needed it no more.
NOTES = "JDISTGRAD_NOTES"
CALLED, JOINED, ENDED, FAILED, GONE = "called", "joined", "ended", "failed", "gone"


def leave_note(what: str, text: str = "") -> None:
    """Leave a note for the launcher, if it wants notes and has none of this kind."""
    folder = os.environ.get(NOTES)
    if folder:
        with (
            contextlib.suppress(OSError),
            open(pathlib.Path(folder, f"{what}-{rank()}"), "x", encoding="utf-8") as note,
        ):
            note.write(text)


def notes(folder: str, what: str) -> dict[int, str]:
    """Return the notes that ranks have left, by rank."""
    return {
        int(path.name.rpartition("-")[2]): path.read_text(encoding="utf-8")
        for path in pathlib.Path(folder).glob(f"{what}-*")
    }


# What tells one job from another, as far as the launcher says.
JOB_VARIABLES = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_PORT", "PMI_FD")
PLACE = "JDISTGRAD_PLACE"  # the job, the rank, and the process that has taken this rank's place


def take_place() -> int | None:
    """Note for children, which inherit the environment, that this process takes its rank's place in the job.

    Return the process that has taken it before, or None.
    """
    place = " ".join([*(os.environ.get(name, "-") for name in JOB_VARIABLES), str(rank())])
    taken, _, process = os.environ.get(PLACE, "").rpartition(" ")
    if taken == place and int(process) != os.getpid():
        return int(process)
    os.environ[PLACE] = f"{place} {os.getpid()}"
    return None


# By this variable mpi4py leaves MPI open at the end of a process.
LEFT_OPEN = "MPI4PY_RC_FINALIZE"


def mpi_is_left_open() -> bool:
    """Return whether the environment has mpi4py leave MPI open at the end, wherever it is imported first."""
    return os.environ.get(LEFT_OPEN, "").lower() in ("0", "false", "no", "n", "off")


def outside_the_job() -> dict[str, str]:
    """Return this process's environment without what would make a child a part of the job."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB) or name.startswith(OF_MPI)
    }


def launched() -> bool:
    """Return whether this process is part of an MPI job."""
    return any(variable in os.environ for variable in LAUNCHER_VARIABLES)


def rank() -> int:
    """Return this process's rank in its job."""
    return _first(RANK_VARIABLES)


def local_rank() -> int:
    """Return this process's rank among the processes of its node."""
    return _first(LOCAL_RANK_VARIABLES)


def _first(names: tuple[str, ...]) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)
