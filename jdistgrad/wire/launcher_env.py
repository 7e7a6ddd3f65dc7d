"""The environment variables by which a launcher describes the job to its processes. Reading them starts no MPI."""

import contextlib
import json
import os
import pathlib

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
# SLURM's is set by srun, with or without MPI, and not in a batch script; the last by torchrun, which knows no MPI.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "ROLE_WORLD_SIZE")
TOGETHER = (  # the remedy if the processes do not find each other
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

# Prefixes of the variables by which a process finds its job, and of MPI's settings, which stay.
OF_A_JOB = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "SLURM_")
OF_MPI = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
OF_A_JOB_IN_OPEN_MPI_4 = ("OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix")  # settings that name the job

# The folder of marker files for `jdistgrad run`, and the markers' names: before MPI starts, ranks cannot communicate
# that they have called ``init``; and mpirun's exit status does not show whether any rank of a job that survives came to
# its end, nor whether one failed when the others did not need it any more.
NOTES = "JDISTGRAD_NOTES"
CALLED, JOINED, ENDED, FAILED = "called", "joined", "ended", "failed"


def leave_note(what: str, text: str = "") -> None:
    """Create a marker file for the launcher, unless this rank has one of this name."""
    folder = os.environ.get(NOTES)
    if folder:
        path = pathlib.Path(folder, f"{what}-{rank()}")
        with contextlib.suppress(OSError), path.open("x", encoding="utf-8") as note:
            note.write(text)


def notes(folder: str, what: str) -> dict[int, str]:
    """Return the texts of the ranks' marker files, by rank."""
    return {
        int(path.name.rpartition("-")[2]): path.read_text(encoding="utf-8")
        for path in pathlib.Path(folder).glob(f"{what}-*")
    }


# The variables in which launchers name a job, or a step of one.
JOB_VARIABLES = ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PMI_JOBID",)
PLACE = "JDISTGRAD_PLACE"  # the job, the rank, and the process that has this rank's place


def job() -> str | None:
    """Return the launcher's name of the job, if there is one."""
    for variables in JOB_VARIABLES:
        if all(name in os.environ for name in variables):
            return "-".join(os.environ[name] for name in variables)
    return None


def take_place() -> None:
    """Mark in the environment, which children inherit, that this process is its rank's."""
    os.environ[PLACE] = json.dumps([job(), rank(), os.getpid()])


def place_taken_by() -> int | None:
    """Return the process that is this process's rank, if it is another one."""
    of, number, process = json.loads(os.environ.get(PLACE, "[null, null, null]"))
    return process if (of, number) == (job(), rank()) and process != os.getpid() else None


LEFT_OPEN = "MPI4PY_RC_FINALIZE"  # the variable by which mpi4py leaves MPI open at the end of a process


def outside_the_job() -> dict[str, str]:
    """Return this process's environment without the variables of the job."""
    of_mpi = {name for name in os.environ if name.startswith(OF_MPI)}
    of_a_job = {name for name in os.environ if name.startswith(OF_A_JOB)} - of_mpi
    of_a_job |= {PLACE, *(name for name in of_mpi if name.startswith(OF_A_JOB_IN_OPEN_MPI_4))}
    return {name: value for name, value in os.environ.items() if name not in of_a_job}


def launched() -> bool:
    """Return whether a launcher has started this process."""
    return any(variable in os.environ for variable in LAUNCHER_VARIABLES) or started_processes()[1] > 1


def started_processes() -> tuple[str, int]:
    """Return the variable with the launcher's number of processes, and the number; ("", 1) without one."""
    name = next((name for name in SIZE_VARIABLES if os.environ.get(name, "").isdecimal()), "")
    return name, int(os.environ[name]) if name else 1


def rank() -> int:
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def local_rank() -> int:
    return next((int(os.environ[name]) for name in LOCAL_RANK_VARIABLES if name in os.environ), 0)
