"""Collective operations: over MPI, over the devices of processes, along an axis of a mesh, among local workers.

Uses rpc to find the participants and to meet. Used by data_parallel, optim, saving and modules.
"""

from jdistgrad.collectives.base import Collectives as Collectives
from jdistgrad.collectives.default import of_this_world as of_this_world
from jdistgrad.collectives.devices import Devices as Devices
from jdistgrad.collectives.host import Local as Local
from jdistgrad.collectives.mesh import Mesh as Mesh
from jdistgrad.collectives.mpi import MPI as MPI

__all__ = ["Collectives", "Devices", "Local", "MPI", "Mesh", "of_this_world"]


def __dir__() -> list[str]:
    return __all__
