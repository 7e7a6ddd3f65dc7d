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


# A folder of `jdistgrad run`, in which each rank leaves a file when it calls ``init``.
ARRIVALS = "JDISTGRAD_ARRIVALS"


def arrive() -> None:
    """Tell `jdistgrad run` that this rank has called ``init``: before MPI starts, ranks cannot tell each other."""
    folder = os.environ.get(ARRIVALS)
    if folder:
        with contextlib.suppress(OSError):
            (pathlib.Path(folder) / str(rank())).touch()


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
