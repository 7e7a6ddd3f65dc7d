"""The collectives of the world this code is in."""

from jdistgrad.data_parallel import world
from jdistgrad.data_parallel.collectives.base import Collectives
from jdistgrad.data_parallel.collectives.local import Local
from jdistgrad.data_parallel.collectives.mpi import MPI


def of_this_world() -> Collectives:
    """New collectives of all its workers. Every worker must call it, in the same order."""
    return Local() if world.is_local() else MPI()


def shared() -> Collectives:
    """The world's own, made by the first who asks. Every worker must ask."""
    found = world.kept("collectives")
    if found is None:
        found = of_this_world()
        world.keep("collectives", found)
    return found
