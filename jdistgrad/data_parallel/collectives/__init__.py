"""Collective operations: over MPI, over the devices of processes, along an axis of a mesh, among local workers.

Uses buckets, and rpc to find the participants. Used by hooks, reducing, steps, the public classes and optim.
"""

from jdistgrad.data_parallel.collectives.base import Collectives as Collectives
from jdistgrad.data_parallel.collectives.default import of_this_world as of_this_world
from jdistgrad.data_parallel.collectives.devices import Devices as Devices
from jdistgrad.data_parallel.collectives.local import Local as Local
from jdistgrad.data_parallel.collectives.mesh import Mesh as Mesh
from jdistgrad.data_parallel.collectives.mpi import MPI as MPI

__all__ = ["Collectives", "Devices", "Local", "MPI", "Mesh", "of_this_world"]


def __dir__() -> list[str]:
    return __all__
