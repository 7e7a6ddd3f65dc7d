"""The environment variables by which a launcher describes the job to its processes. Reading them starts no MPI."""

import contextlib
import json
import os
import pathlib

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
# SLURM's is set by srun, with or without MPI, and not in a batch script; the last by torchrun, which knows no MPI.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "ROLE_WORLD_SIZE")
# The remedy where the processes that these variables count do not find each other.
TOGETHER = (
    "start the processes with the mpirun of this MPI, also in a batch job, or with srun --mpi=pmix (srun --mpi=list "
    "shows the kinds there are)"
)
LOCAL_RANK_VARIABLES = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)

# The variables by which a process finds its job. The settings of MPI (OMPI_MCA_...) are not among them.
OF_A_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
OF_MPI = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
OF_A_JOB_IN_OPEN_MPI_4 = ("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix")  # where settings name the job, too


# Where ranks leave notes for `jdistgrad run`, and what the notes are called: before MPI starts, ranks cannot tell each
# other that they have called ``init``; and mpirun's exit status does not tell whether any rank of a job that survives
# came to its end, nor whether one failed when the others needed it no more.
NOTES = "JDISTGRAD_NOTES"
CALLED, JOINED, ENDED, FAILED = "called", "joined", "ended", "failed"


def leave_note(what: str, text: str = "") -> None:
    """Leave a note for the launcher, if it wants notes and has none of this kind."""
    folder = os.environ.get(NOTES)
    if folder:
        path = pathlib.Path(folder, f"{what}-{rank()}")
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as note:
            note.write(text)


def notes(folder: str, what: str) -> dict[int, str]:
    """Return the notes that ranks have left, by rank."""
    return {
        int(path.name.rpartition("-")[2]): path.read_text(encoding="utf-8")
        for path in pathlib.Path(folder).glob(f"{what}-*")
    }


# The variables in which launchers name a job, or a step of one.
JOB_VARIABLES = ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMI_JOBID",)
PLACE = "JDISTGRAD_PLACE"  # the job, the rank, and the process that has this rank's place


def job() -> str | None:
    """Return the name that the launcher has given to the job, if it has."""
    for variables in JOB_VARIABLES:
        if all(name in os.environ for name in variables):
            return "-".join(os.environ[name] for name in variables)
    return None


def take_place() -> None:
    """Note for children, which inherit the environment, that this process has its rank's place in the job."""
    os.environ[PLACE] = json.dumps([job(), rank(), os.getpid()])


def place_taken_by() -> int | None:
    """Return the process that has the place of this one in the job, if another has taken it."""
    of, number, process = json.loads(os.environ.get(PLACE, "[null, null, null]"))
    return process if (of, number) == (job(), rank()) and process != os.getpid() else None


# By this variable mpi4py leaves MPI open at the end of a process.
LEFT_OPEN = "MPI4PY_RC_FINALIZE"


def outside_the_job() -> dict[str, str]:
    """Return this process's environment without what would make a child a part of the job."""
    of_mpi = {name for name in os.environ if name.startswith(OF_MPI)}
    of_a_job = {name for name in os.environ if name.startswith(OF_A_JOB)} - of_mpi
    of_a_job |= {PLACE, *(name for name in of_mpi if name.startswith(OF_A_JOB_IN_OPEN_MPI_4))}
    return {name: value for name, value in os.environ.items() if name not in of_a_job}


def launched() -> bool:
    """Return whether a launcher has started this process as part of a job."""
    return any(variable in os.environ for variable in LAUNCHER_VARIABLES) or started_processes()[1] > 1


def started_processes() -> tuple[str, int]:
    """Return how many processes the launcher says it has started, or 1, and the variable that says so."""
    name = next((name for name in SIZE_VARIABLES if os.environ.get(name, "").isdecimal()), "")
    return name, int(os.environ[name]) if name else 1


def rank() -> int:
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def local_rank() -> int:
    return next((int(os.environ[name]) for name in LOCAL_RANK_VARIABLES if name in os.environ), 0)
