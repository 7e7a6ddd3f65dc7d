"""MPI processes as engines of a notebook."""

import importlib.util
import threading
from typing import Any

from jdistgrad.cli import launch
from jdistgrad.errors import LauncherError

STARTED_WITHIN = 120.0  # seconds


class MpiEngines:
    """Processes under mpirun on this machine, driven from a notebook by ipyparallel.

    Cells that begin with ``%%px`` run on all of them, once each has called ``jd.init()`` as a worker. Needs
    ``pip install ipyparallel``. They end with the kernel, also when it is killed.

    Arguments:
      n: the number of processes.

    Attributes:
      view: ipyparallel's view of all engines: ``view["name"]`` is the variable's value on each.
    """

    def __init__(self, n: int):
        if importlib.util.find_spec("ipyparallel") is None:
            raise LauncherError("MpiEngines drives processes through ipyparallel: pip install ipyparallel")
        import ipyparallel  # type: ignore[import-untyped]
        from ipyparallel.cluster.launcher import ipcontroller_cmd_argv  # type: ignore[import-untyped]
        from traitlets.config import Config

        config: Any = Config()
        # Programs end with the thread that starts them, which must stay: a notebook's does.
        leashed = launch.leashed if threading.current_thread() is threading.main_thread() else list
        config.MPILauncher.mpi_cmd = leashed(launch.mpirun(n)[:-2])  # ipyparallel adds the number of ranks
        config.MPILauncher.mpi_args = []
        config.MPILauncher.environment = launch.environment(n)
        config.LocalControllerLauncher.controller_cmd = leashed(ipcontroller_cmd_argv)
        self._cluster = ipyparallel.Cluster(n=n, engines="mpi", config=config, log_level=40)
        self._cluster.start_cluster_sync()
        try:
            client = self._cluster.connect_client_sync()
            client.wait_for_engines(n, interactive=False, timeout=STARTED_WITHIN)
        except BaseException:
            self._cluster.stop_cluster_sync()
            raise
        self.view = client[:]
        self.view.block = True
        self.view.activate()

    def of_rank(self, rank: int, worker: str = "me") -> Any:
        """Return the view of the engine with a rank. ``worker``: the variable with the result of ``jd.init()``."""
        ranks = [one.rank for one in self.view[worker]]
        if rank not in ranks:
            raise ValueError(f"there is no rank {rank!r} among the engines, whose ranks are {sorted(ranks)}")
        return self.view.client[ranks.index(rank)]

    def close(self) -> None:
        """End the processes. Call ``jd.shutdown()`` on them first."""
        self._cluster.stop_cluster_sync()
        self.view.client.close()

    def __repr__(self) -> str:
        return f"MpiEngines({len(self.view)})"
