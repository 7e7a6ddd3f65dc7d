"""What a launcher tells its processes through the environment. Asking does not start MPI."""

import os

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID")


def launched() -> bool:
    """Whether this process is part of an MPI job."""
    return any(variable in os.environ for variable in LAUNCHER_VARIABLES)


def rank() -> int:
    """This process's number in its job."""
    return _first(RANK_VARIABLES)


def local_rank() -> int:
    """This process's number among those of its node."""
    return _first(LOCAL_RANK_VARIABLES)


def _first(names: tuple[str, ...]) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)
